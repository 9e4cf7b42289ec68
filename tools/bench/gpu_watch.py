"""Samples GPU memory and the memory of a run's processes while it goes on. Used by `gpu_step.py`; standard library and
psutil only."""

import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import psutil

GPU_INTERVAL_S = 0.25
HOST_INTERVAL_S = 1.0
ROLES = {
    "rank": ("ray::TrainWorker",),
    "manager": ("ray::RolloutWorker",),
    "engine": ("ray::EngineServer", "sglang::", "sglang.launch_server", "rlkit.engines.embedded.server"),
    "router": ("sglang_router",),
}
"""Role -> what its command line contains. The driver is known by its id; everything else (Ray's own processes, graders,
guardians) counts as `other`."""

Window = tuple[float, float]
"""Unix time, from and to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """One value of one thing at one time."""

    time: float
    name: str
    """A GPU's index (`0`), or a role."""
    gib: float


class Watch:
    """`with Watch(pid) as watch:` samples from the moment it is made until the block is left."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self.gpu: list[Reading] = []
        self.host: list[Reading] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._watch_host, daemon=True)]
        self._smi = start_nvidia_smi()
        if self._smi is not None:
            self._threads.append(threading.Thread(target=self._watch_gpus, args=(self._smi,), daemon=True))

    def __enter__(self) -> "Watch":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._smi is not None:
            self._smi.kill()
            self._smi.wait()
        for thread in self._threads:
            thread.join(timeout=10.0)

    def _watch_gpus(self, smi: "subprocess.Popen[str]") -> None:
        assert smi.stdout is not None
        for line in smi.stdout:
            index, _, mib = line.partition(",")
            if mib.strip().isdigit():
                self.gpu.append(Reading(time=time.time(), name=index.strip(), gib=int(mib) / 1024))

    def _watch_host(self) -> None:
        while not self._stop.wait(HOST_INTERVAL_S):
            now = time.time()
            for role, num_bytes in resident_bytes(self._root).items():
                self.host.append(Reading(time=now, name=role, gib=num_bytes / 1024**3))


def start_nvidia_smi() -> "subprocess.Popen[str] | None":
    """A line a GPU four times a second; None where there is no NVIDIA GPU."""
    path = shutil.which("nvidia-smi")
    if path is None:
        return None
    query = ["--query-gpu=index,memory.used", "--format=csv,noheader,nounits", f"-lms={int(GPU_INTERVAL_S * 1000)}"]
    return subprocess.Popen([path, *query], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def resident_bytes(root: psutil.Process) -> dict[str, int]:
    """Resident bytes of the driver and everything below it, by role. Shared pages count in each process."""
    totals: dict[str, int] = {}
    try:
        family = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return totals
    for process in family:
        try:
            role = "driver" if process.pid == root.pid else role_of(" ".join(process.cmdline()))
            totals[role] = totals.get(role, 0) + process.memory_info().rss
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return totals


def generating_process(root: int) -> int:
    """The engine process of a run that does the work: SGLang's scheduler or the embedded server. LookupError when there
    is none."""
    for process in psutil.Process(root).children(recursive=True):
        try:
            words = " ".join([process.name(), *process.cmdline()])
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
        if "guardian" not in words and any(mark in words for mark in ("sglang::scheduler", "embedded.server")):
            return process.pid
    raise LookupError(f"no engine below process {root}")


def role_of(command: str) -> str:
    return next((role for role, marks in ROLES.items() if any(mark in command for mark in marks)), "other")


def peak(readings: Iterable[Reading], windows: Sequence[Window]) -> dict[str, float]:
    """Largest value inside the windows, by name."""
    found: dict[str, float] = {}
    for reading in readings:
        if any(begin <= reading.time <= end for begin, end in windows):
            found[reading.name] = max(found.get(reading.name, 0.0), reading.gib)
    return found


def typical(readings: Iterable[Reading], window: Window) -> dict[str, float]:
    """Median inside the window, by name."""
    values: dict[str, list[float]] = {}
    for reading in readings:
        if window[0] <= reading.time <= window[1]:
            values.setdefault(reading.name, []).append(reading.gib)
    return {name: statistics.median(found) for name, found in values.items()}


def growth(early: Mapping[str, float], late: Mapping[str, float], *, share: float, gib: float) -> list[str]:
    """What grew by more than `share` and by more than `gib`, as sentences."""
    return [
        f"{name}: {early[name]:.2f} -> {late[name]:.2f} GiB"
        for name in sorted(early.keys() & late.keys())
        if late[name] - early[name] > max(gib, share * early[name])
    ]
