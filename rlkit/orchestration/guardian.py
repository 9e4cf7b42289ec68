"""Runs one command and never outlives its parent, nor lets the command do so.

    python -m rlkit.orchestration.guardian COMMAND ...      (started by `processes.py`, with a pipe as standard input)

The parent keeps the other end of the pipe. When the parent dies in whatever way, the kernel closes it and the guardian
ends the command's whole process group. PR_SET_PDEATHSIG alone would not do: it fires when the *thread* that started the
child exits, and it is not inherited by grandchildren (SGLang's scheduler, torch's shared-memory manager). Should the
guardian itself be killed, the command gets SIGKILL by PR_SET_PDEATHSIG, which is safe here because the guardian has one
thread.

Standard library only: it starts in a few hundredths of a second.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time

GRACE_S = 3.0
"""Seconds between SIGTERM and SIGKILL to the command's group."""
PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> int:
    """Returns the command's exit status, as a shell would (128 + signal)."""
    libc = ctypes.CDLL(None)
    stop_read, stop_write = os.pipe()
    signal.signal(signal.SIGTERM, lambda *_: os.write(stop_write, b"x"))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal group; the parent decides
    signal.signal(signal.SIGCHLD, lambda *_: os.write(stop_write, b"c"))
    child = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
    )
    while child.poll() is None:
        ready, _, _ = select.select([0, stop_read], [], [])
        if 0 in ready and not os.read(0, 1):
            break  # the parent is gone
        if stop_read in ready and b"x" in os.read(stop_read, 64):
            break
    end_group(child)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def end_group(child: subprocess.Popen) -> None:
    """SIGTERM, then SIGKILL, to the whole group of the command, until the command is reaped and nobody is left in
    it."""
    deadline = time.monotonic() + GRACE_S
    signal_group(child.pid, signal.SIGTERM)
    while time.monotonic() < deadline:
        if child.poll() is not None and not signal_group(child.pid, 0):
            return
        time.sleep(0.02)
    signal_group(child.pid, signal.SIGKILL)
    child.wait()


def signal_group(pgid: int, number: int) -> bool:
    """Send a signal to a process group; False when it is empty."""
    try:
        os.killpg(pgid, number)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
