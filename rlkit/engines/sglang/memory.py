"""How much of a GPU SGLang may take for weights and KV cache. Called by `launch.py`.

SGLang's own default leaves room for its activations and CUDA graphs and takes the rest. Colocated, that rest is not all
ours: a sleeping trainer keeps its CUDA context and small buffers, and the weight update stages buckets.
"""

import ctypes
import math

from rlkit.types.errors import EngineError

GIB = 1024**3
ENGINE_SHARE = 0.1
"""Of a GPU, for the engine's activations and CUDA graphs: 14 GiB of an H200, where SGLang's own formula (1.5 MiB a
token of a chunked prefill, 2 MiB a sequence of a captured batch) gives 13."""
SLEEPING_TRAINER_BYTES = 2 * GIB
CONTEXT_BYTES = GIB
"""CUDA contexts of the trainer and of its communicators."""
MIN_FRACTION, MAX_FRACTION = 0.3, 0.9


def colocated_fraction(total_bytes: int, *, bucket_bytes: int) -> float:
    """`--mem-fraction-static` of an engine that shares its GPU with a trainer: what is left of `total_bytes` after the
    engine's own activations, a sleeping trainer, its context and two staged buckets. Rounded down to a hundredth.
    """
    reserved = ENGINE_SHARE * total_bytes + SLEEPING_TRAINER_BYTES + CONTEXT_BYTES + 2 * bucket_bytes
    fraction = math.floor(100 * (1 - reserved / total_bytes) + 1e-6) / 100
    return min(MAX_FRACTION, max(MIN_FRACTION, fraction))


def device_memory_bytes(gpu: int) -> int:
    """Memory of the CUDA device `gpu`, asked of the driver: neither torch nor a CUDA context is needed for it."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise EngineError(_failure(gpu, str(error))) from error
    device, size = ctypes.c_int(), ctypes.c_size_t()
    for status in (
        driver.cuInit(0),
        driver.cuDeviceGet(ctypes.byref(device), gpu),
        driver.cuDeviceTotalMem_v2(ctypes.byref(size), device),
    ):
        if status != 0:
            raise EngineError(_failure(gpu, f"CUDA error {status}"))
    return size.value


def _failure(gpu: int, reason: str) -> str:
    return (
        f"cannot ask the driver for the memory of GPU {gpu} ({reason}); pass --sglang-mem-fraction-static yourself, "
        "e.g. 0.8"
    )
