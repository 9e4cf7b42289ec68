"""What this machine has, asked without torch: CUDA devices by the driver, memory by the system."""

import ctypes
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaDevice:
    """One GPU as the driver tells it."""

    index: int
    name: str
    num_bytes: int


def cuda_devices() -> list[CudaDevice]:
    """All GPUs that the driver shows to this process; none where there is no driver. Makes no CUDA context."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    number = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(number)) != 0:
        return []
    found: list[CudaDevice] = []
    for index in range(number.value):
        device, size, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(128)
        statuses = (
            driver.cuDeviceGet(ctypes.byref(device), index),
            driver.cuDeviceTotalMem_v2(ctypes.byref(size), device),
            driver.cuDeviceGetName(name, 128, device),
        )
        if not any(statuses):
            found.append(CudaDevice(index=index, name=name.value.decode(), num_bytes=size.value))
    return found


def driver_version() -> str | None:
    """The newest CUDA version that the driver runs, e.g. `13.0`; None without a driver."""
    version = ctypes.c_int()
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}" if status == 0 else None


def host_memory_bytes() -> int:
    """Memory of this machine."""
    return psutil.virtual_memory().total
