"""Where the processes of a run are, in the moment in which it hangs: state and stacks of each. Called by the watchdog.

Looks at the descendants of this process, which on a private cluster are all of this node; other nodes are out of reach.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import psutil

from rlkit.observability.stack_dumps import DUMP_SIGNAL

PY_SPY_TIMEOUT_S = 15.0
SETTLE_S = 1.0
"""For faulthandler to have written."""


def run_processes() -> list[psutil.Process]:
    """This process and everything below it."""
    me = psutil.Process()
    return [me, *me.children(recursive=True)]


def stopped_processes(processes: Sequence[psutil.Process]) -> list[str]:
    """Those that a signal or a debugger has stopped, by number and command: they never move by themselves."""
    told = []
    for process in processes:
        try:
            if process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                told.append(f"process {process.pid} is stopped (SIGSTOP or a debugger): {command_of(process)}")
        except psutil.NoSuchProcess:
            continue
    return told


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:160] or process.name()
    except psutil.Error:
        return "gone"


def dump_stacks(processes: Sequence[psutil.Process], directory: Path) -> list[str]:
    """Write `processes.txt` and the stacks of every Python process into `directory`; says what could not be had."""
    directory.mkdir(parents=True, exist_ok=True)
    table = [f"{process.pid:>8} {state_of(process):<12} {command_of(process)}" for process in processes]
    (directory / "processes.txt").write_text("\n".join(table) + "\n")
    py_spy = find_py_spy()
    problems: list[str] = []
    signalled = 0
    for process in processes:
        if not is_python(process):
            continue
        if py_spy is not None:
            problem = spy(py_spy, process, directory)
            if problem is None:
                continue
            problems.append(problem)
        if process.pid == os.getpid():
            (directory / f"{process.pid}-this_process.txt").write_text(own_stacks())
        else:
            signalled += ask_for_stacks(process)
    if signalled:
        time.sleep(SETTLE_S)
        problems.append(f"{signalled} processes wrote their stacks to the end of their own log in {directory.parent}")
    return problems


def own_stacks() -> str:
    """Of every thread of this process, read with the interpreter's lock held: faulthandler reads without it and can
    crash a process whose threads run on.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        parts.append(f"thread {names.get(ident, ident)}\n" + "".join(traceback.format_stack(frame)))
    return "\n".join(parts)


def find_py_spy() -> str | None:
    """The program of this Python's environment, else that of the path."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if beside.is_file() else shutil.which("py-spy")


def spy(py_spy: str, process: psutil.Process, directory: Path) -> str | None:
    """Stacks by py-spy, which needs no help of the process; what went wrong, or None."""
    command = [py_spy, "dump", "--pid", str(process.pid), "--nonblocking"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PY_SPY_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"py-spy took too long for process {process.pid}"
    if done.returncode != 0:
        return f"py-spy failed for process {process.pid}: {done.stderr.strip().splitlines()[-1:]}"
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", command_of(process))[:60]
    (directory / f"{process.pid}-{name}.txt").write_text(done.stdout)
    return None


def ask_for_stacks(process: psutil.Process) -> bool:
    """SIGUSR1, but only to a process that handles it: it would end any other."""
    if not catches(process.pid, DUMP_SIGNAL):
        return False
    try:
        os.kill(process.pid, DUMP_SIGNAL)
    except ProcessLookupError:
        return False
    return True


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a handler of that process is installed for the signal (`SigCgt` of proc(5))."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    match = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return match is not None and bool(int(match[1], 16) >> (number - 1) & 1)


def is_python(process: psutil.Process) -> bool:
    try:
        return "python" in Path(process.exe()).name
    except psutil.Error:
        return False


def state_of(process: psutil.Process) -> str:
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return "gone"
