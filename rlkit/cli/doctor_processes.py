"""Checks of `rlkit doctor` that start processes: what torch sees of the GPUs, collectives between ranks, Ray."""

import json
import os
import subprocess
import sys

from rlkit.cli.doctor import Outcome, failed, ok, warning
from rlkit.cli.machine import cuda_devices, driver_version
from rlkit.config.schema import RunConfig
from rlkit.engines.base import free_port

TIMEOUT_S = 100.0

GPU_PROBE = """
import json, torch
seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
for index in range(seen):
    square = torch.ones(64, 64, device=f"cuda:{index}")
    assert (square @ square).sum().item() == 64.0 ** 3
print(json.dumps({"seen": seen, "built": torch.version.cuda, "torch": torch.__version__}))
"""

COLLECTIVE_PROBE = """
import datetime, os, sys
import torch, torch.distributed as dist
rank, size, backend = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
if backend == "nccl":
    torch.cuda.set_device(rank)
dist.init_process_group(backend, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=60))
value = torch.full((1 << 20,), float(rank + 1), device="cuda" if backend == "nccl" else "cpu")
dist.all_reduce(value)
assert value[0].item() == size * (size + 1) / 2, value[0].item()
dist.destroy_process_group()
"""

RAY_PROBE = """
import logging, os
os.environ.pop("RAY_ADDRESS", None)
import ray
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
assert ray.get(ray.put(41)) == 41
ray.shutdown()
"""


def gpus(cfg: RunConfig) -> Outcome:
    """Driver and torch agree on the GPUs, and each of them computes."""
    here = cuda_devices()
    if not here:
        if cfg.cluster.device == "cuda":
            return failed("--device cuda, and the driver shows no GPU", "install the driver (containers: --gpus all)")
        return ok("none; runs compute on the CPU")
    if cfg.cluster.device == "cpu":
        return ok(f"{len(here)} x {here[0].name}, not used (--device cpu)")
    done = run_python(GPU_PROBE)
    if done.returncode != 0:
        return failed(last_line(done), "nvidia-smi tells the state of the GPU; another process may hold its memory")
    seen = json.loads(done.stdout.strip().splitlines()[-1])
    if seen["seen"] != len(here):
        return failed(
            f"the driver (CUDA {driver_version()}) shows {len(here)} GPUs, torch {seen['torch']} (CUDA {seen['built']})"
            f" uses {seen['seen']}",
            "install a torch that was built for CUDA of at most the driver's version, or a newer driver",
        )
    wanted = cfg.cluster.slots_per_node
    if len(here) < wanted:
        return failed(
            f"{len(here)} GPUs here, the flags count with {wanted} to a node", f"pass --num-gpus-per-node {len(here)}"
        )
    return ok(f"{len(here)} x {here[0].name}, driver CUDA {driver_version()}, torch CUDA {seen['built']}; all compute")


def collectives(cfg: RunConfig) -> Outcome:
    """Ranks add numbers up: NCCL between all GPUs, or gloo between two processes."""
    num_gpus = len(cuda_devices())
    on_gpus = num_gpus >= 2 and cfg.cluster.device != "cpu"
    backend, size = ("nccl", num_gpus) if on_gpus else ("gloo", 2)
    env = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port("127.0.0.1")),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", COLLECTIVE_PROBE, str(rank), str(size), backend],
            env=env,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        errors = [rank.communicate(timeout=TIMEOUT_S)[1] for rank in ranks]
    except subprocess.TimeoutExpired:
        return failed(f"{backend} between {size} ranks hangs", remedy_of(backend))
    finally:
        for rank in ranks:
            rank.kill()
    bad = [error for rank, error in zip(ranks, errors, strict=True) if rank.returncode != 0]
    if bad:
        return failed(f"{backend} between {size} ranks: {bad[0].strip().splitlines()[-1][:300]}", remedy_of(backend))
    more = "" if on_gpus or num_gpus < 1 else "; one GPU, so NCCL has nothing to connect"
    return ok(f"{backend} adds up between {size} ranks{more}")


def remedy_of(backend: str) -> str:
    if backend == "nccl":
        return "NCCL_DEBUG=INFO tells where it stops; try NCCL_P2P_DISABLE=1, NCCL_NVLS_ENABLE=0, more /dev/shm"
    return "set GLOO_SOCKET_IFNAME to an interface that works, e.g. lo"


def ray_starts(cfg: RunConfig) -> Outcome:
    """A private cluster comes up and goes away; or the one of `--ray-address` is asked for nothing here."""
    if cfg.cluster.ray_address is not None:
        return ok(f"runs join {cfg.cluster.ray_address}; not tried")
    try:
        done = run_python(RAY_PROBE)
    except subprocess.TimeoutExpired:
        return failed(f"it does not start within {TIMEOUT_S:.0f} s", "look into /tmp/ray/session_latest/logs")
    if done.returncode != 0:
        return failed(last_line(done), "look into /tmp/ray/session_latest/logs; a full disk and /dev/shm are common")
    if os.environ.get("RAY_ADDRESS"):
        return warning(
            "starts; but RAY_ADDRESS is set, so a run joins that cluster", "unset RAY_ADDRESS for a private one"
        )
    return ok("a private cluster starts and stops")


def run_python(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in (done.stderr or done.stdout).strip().splitlines() if line.strip()]
    return lines[-1][:300] if lines else f"exit status {done.returncode}"
