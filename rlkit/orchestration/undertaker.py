"""Ends whatever a driver leaves behind when it is killed, and removes the shared memory of its dead processes.

    python -m rlkit.orchestration.undertaker RUN      (started by `processes.py`, with a pipe from the driver as its
                                                       input)

While the driver lives, this process notes the driver's descendants every second. When the pipe closes without a word it
gives them a moment to notice for themselves (guardians and Ray workers do) and then kills those that are left: Ray's
agents outlive a SIGKILL of the driver for minutes, waiting for a control store that has died with it (seen with 2.60).
After a proper end the driver says so first, and nothing is killed. Otherwise the report of the run is written here,
since nobody else is left to do it.

In both cases files of torch's shared memory are removed whose owner is dead: torch's own manager process does that, but
a Ray worker that exits takes the manager down with SIGKILL.
"""

import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

SCAN_S = 1.0
GRACE_S = 6.0
"""Longer than a guardian's own grace."""
PROPER_END = b"."
REPORT_TIMEOUT_S = 60.0
SHARED_MEMORY = Path("/dev/shm")
TORCH_FILE = re.compile(r"torch_(\d+)_\d+_\d+")


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver
    driver = psutil.Process(os.getppid())
    known: set[psutil.Process] = set()
    while not select.select([0], [], [], SCAN_S)[0]:
        known |= descendants(driver)
    if os.read(0, 1) != PROPER_END:
        end(known)
        write_last_report(Path(sys.argv[1]))
    remove_shared_memory({process.pid for process in known if not is_alive(process)})


def write_last_report(run_dir: Path) -> None:
    """In a process of its own, whose failure is nobody's."""
    command = [sys.executable, "-m", "rlkit.cli.main", "report", "--quiet", str(run_dir)]
    output = subprocess.DEVNULL
    subprocess.run(command, stdin=output, stdout=output, stderr=output, check=False, timeout=REPORT_TIMEOUT_S)


def descendants(driver: psutil.Process) -> set[psutil.Process]:
    """Every process below the driver but this one."""
    try:
        return {process for process in driver.children(recursive=True) if process.pid != os.getpid()}
    except psutil.NoSuchProcess:
        return set()


def end(processes: set[psutil.Process]) -> None:
    """Wait a little for them to end, then kill. psutil compares start times, so a reused process id is never hit."""
    deadline = time.monotonic() + GRACE_S
    left = {process for process in processes if is_alive(process)}
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left = {process for process in left if is_alive(process)}
    for process in left:
        try:
            process.kill()
            process.wait(1.0)
        except psutil.Error:
            continue


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def remove_shared_memory(owners: set[int]) -> None:
    """Files are named by the process that made them."""
    for path in SHARED_MEMORY.iterdir():
        match = TORCH_FILE.fullmatch(path.name)
        if match and int(match[1]) in owners:
            path.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
