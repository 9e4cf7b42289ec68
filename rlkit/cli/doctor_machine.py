"""Checks of `rlkit doctor` that only look at this machine: versions, shared memory, network, disk, memory, limits."""

import os
import resource
import shutil
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import MappingProxyType

import psutil
from packaging.requirements import Requirement
from packaging.version import Version

from rlkit.algo.memory_plan import GIB
from rlkit.cli.doctor import Outcome, failed, ok, warning
from rlkit.cli.dry_run_phases import frozen_params, memory_problems, planned_hardware, policy_shape
from rlkit.cli.machine import cuda_devices
from rlkit.cli.model_size import model_size
from rlkit.config.schema import RunConfig

TESTED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "torch": ("2.11", "2.13"),
        "transformers": ("5.12.1",),
        "ray": ("2.60",),
        "sglang": ("0.5.17",),
        "sglang-router": ("0.3.2",),
    }
)
"""Package -> versions that the tests of a release ran with. sglang is needed for GPUs only."""
TESTED_PYTHON = ("3.11", "3.12")
MIN_SHM_BYTES, GOOD_SHM_BYTES = 256 * 1024**2, 2 * GIB
STATE_BYTES = 12
"""Of a parameter in a checkpoint: master weight and two moments."""
MIN_DISK_BYTES = GIB
MIN_FILES = 4096
SHM = Path("/dev/shm")


def versions(cfg: RunConfig) -> Outcome:
    """Installed packages against what rlkit requires, and against what was tested."""
    del cfg
    missing: list[str] = []
    for line in metadata.requires("rlkit") or []:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        installed = installed_version(requirement.name)
        if installed is None:
            missing.append(f"{requirement.name} is not installed")
        elif not requirement.specifier.contains(installed, prereleases=True):
            missing.append(f"{requirement.name} {installed} is outside of {requirement.specifier}")
    if missing:
        return failed("; ".join(missing), "pip install -e . in the environment that runs rlkit")
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    untested = [] if python in TESTED_PYTHON else [f"Python {python} (tested: {', '.join(TESTED_PYTHON)})"]
    for name, known in TESTED.items():
        installed = installed_version(name)
        if installed is not None and not any(is_release_of(installed, version) for version in known):
            untested.append(f"{name} {installed} (tested: {', '.join(known)})")
    if untested:
        return warning("not tested: " + ", ".join(untested), "install a tested version if something odd happens")
    told = ", ".join(f"{name} {installed_version(name)}" for name in TESTED if installed_version(name) is not None)
    return ok(f"Python {python}, {told}")


def installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def is_release_of(installed: str, known: str) -> bool:
    """Whether `installed` (2.11.0+cu130) is a release of `known` (2.11)."""
    parts = Version(known).release
    return Version(installed).release[: len(parts)] == parts


def shared_memory(cfg: RunConfig) -> Outcome:
    """Ray keeps batches there, and on a CPU a weight update goes through it."""
    if not SHM.is_dir() or not os.access(SHM, os.W_OK):
        return failed(f"{SHM} is not there or cannot be written", "mount a tmpfs there (containers: --ipc=host)")
    free = shutil.disk_usage(SHM).free
    size = model_size(cfg.model.hf_checkpoint) if cfg.model.hf_checkpoint else None
    bucket = min(cfg.sync.update_weight_buffer_size, 4 * size.num_params) if size is not None else 0
    found = f"{free / GIB:.1f} GiB free in {SHM}"
    remedy = "start the container with --ipc=host or --shm-size=16g, or remount: mount -o remount,size=16g /dev/shm"
    if free < max(MIN_SHM_BYTES, bucket):
        return failed(found, remedy)
    return ok(found) if free >= GOOD_SHM_BYTES else warning(found + ", little", remedy)


def network(cfg: RunConfig) -> Outcome:
    """Ports of the loopback interface can be bound and reached, and the host's own name means something."""
    del cfg
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=5.0) as client:
                server.settimeout(5.0)
                accepted, _ = server.accept()
                with accepted:
                    client.sendall(b"rlkit")
                    if accepted.recv(5) != b"rlkit":
                        return failed(f"port {port} of 127.0.0.1 answers with something else", LOOPBACK_REMEDY)
    except OSError as error:
        return failed(f"no port of 127.0.0.1 can be bound and reached: {error}", LOOPBACK_REMEDY)
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError as error:
        return failed(
            f"this host's name, {socket.gethostname()}, has no address: {error}",
            "add it to /etc/hosts: Ray asks for it",
        )
    proxies = [name for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY") if os.environ.get(name)]
    exempt = os.environ.get("no_proxy", os.environ.get("NO_PROXY", ""))
    if proxies and "127.0.0.1" not in exempt and exempt != "*":
        return warning(
            f"{', '.join(proxies)} is set and no_proxy does not name 127.0.0.1",
            "export no_proxy=127.0.0.1,localhost and the cluster's addresses: engines are reached by HTTP",
        )
    return ok(f"loopback works; this host is {address}")


LOOPBACK_REMEDY = "bring the loopback interface up (ip link set lo up), and look for a firewall"


def file_limits(cfg: RunConfig) -> Outcome:
    """Open files, and with GPUs locked memory: sleeping pins the trainer's state."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < MIN_FILES:
        return failed(
            f"{files} open files", f"ulimit -n 65536: connections to engines and Ray take more than {MIN_FILES}"
        )
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if cuda_devices() and cfg.cluster.device != "cpu" and locked not in (resource.RLIM_INFINITY, -1):
        return warning(
            f"{locked / GIB:.2f} GiB of locked memory",
            "ulimit -l unlimited: else sleeping and waking are several times slower",
        )
    return ok(f"{files if files != resource.RLIM_INFINITY else 'unlimited'} open files")


def disk_space(cfg: RunConfig) -> Outcome:
    """Room for a checkpoint where the run saves, and for Ray's session."""
    folder = Path(cfg.checkpoint.save or cfg.logging.output_dir or "runs")
    size = model_size(cfg.model.hf_checkpoint) if cfg.model.hf_checkpoint else None
    needed = max(MIN_DISK_BYTES, STATE_BYTES * size.num_params if size is not None else 0)
    for place, least in ((existing(folder), needed), (Path(os.environ.get("RAY_TMPDIR", "/tmp")), MIN_DISK_BYTES)):
        if not os.access(place, os.W_OK):
            return failed(f"{place} cannot be written", "choose another --output-dir or --save, or set RAY_TMPDIR")
        free = shutil.disk_usage(place).free
        if free < least:
            return failed(
                f"{free / GIB:.1f} GiB free at {place}, at least {least / GIB:.1f} are needed",
                "make room, or choose another --output-dir or --save (Ray's: RAY_TMPDIR)",
            )
    free = shutil.disk_usage(existing(folder)).free
    told = "" if size is None else f", a checkpoint takes {STATE_BYTES * size.num_params / GIB:.1f}"
    return ok(f"{free / GIB:.0f} GiB free{told}")


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())


def memory(cfg: RunConfig) -> Outcome:
    """The estimate of every phase's peak against GPUs and host of this machine."""
    free = psutil.virtual_memory().available
    if cfg.cluster.device == "auto" and not cuda_devices():
        cfg = replace(cfg, cluster=replace(cfg.cluster, device="cpu"))
    shape = policy_shape(cfg) if cfg.model.hf_checkpoint else None
    if shape is None:
        return ok(f"{free / GIB:.1f} GiB of host memory free; no model to compare with")
    problems = list(memory_problems(cfg, shape, planned_hardware(cfg), frozen_params=frozen_params(cfg)))
    if problems:
        return failed("; ".join(problems), "--dry-run shows every phase")
    return ok(f"{free / GIB:.1f} GiB of host memory free; every phase is estimated to fit")
