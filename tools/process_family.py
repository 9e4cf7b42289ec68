"""Finds the processes of a run, by what they are. Used by `chaos.py` and by the tests that kill."""

import os
import subprocess
import time
from collections.abc import Callable, Sequence

import psutil

VICTIMS: dict[str, Callable[[str], bool]] = {
    "driver": lambda command: "train.py" in command or "train_async.py" in command,
    "rank": lambda command: "ray::TrainWorker" in command,
    "engine": lambda command: "rlkit.engines.embedded.server" in command and "guardian" not in command,
    "router": lambda command: "sglang::router" in command,  # the name that it gives its process
}


def family(driver: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    """The driver, everything below it, and torch's shared-memory managers, which leave their family. Empty once the
    driver has ended."""
    try:
        root = psutil.Process(driver.pid)
        began, below = root.create_time(), root.children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    managers = [
        process
        for process in psutil.process_iter(["name", "create_time"])
        if "torch_shm_manager" in (process.info["name"] or "") and process.info["create_time"] >= began
    ]
    return [root, *below, *managers]


def is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def command_of(process: psutil.Process) -> str:
    """Empty for a process that has just ended."""
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return ""


def wait_until_gone(processes: Sequence[psutil.Process], timeout_s: float) -> list[str]:
    """What is left of them after that time, as `pid command`."""
    deadline = time.monotonic() + timeout_s
    while (left := [p for p in processes if not is_gone(p)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [f"{process.pid} {command_of(process)[:100]}" for process in left]


def listening_ports(processes: Sequence[psutil.Process]) -> set[int]:
    pids = {process.pid for process in processes}
    found = psutil.net_connections(kind="tcp")
    return {c.laddr.port for c in found if c.laddr and c.status == psutil.CONN_LISTEN and c.pid in pids}


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))
