"""One flat piece of host memory, pinned where there is a GPU, that tensors are copied into. Called by `sleep.py`.

torch's own pinned allocations are rounded up to a power of two, which can waste half of a large one, and their first
touch happens while the GPU waits. So the memory is taken from the system as it is, touched by a thread while other
parts of the run start, and then registered with CUDA.
"""

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

NUM_TOUCHING = 8
"""Threads: torch's own may be limited to one in a Ray actor."""


class HostBuffer:
    """Grows to what is asked for; never shrinks. Not to be grown while somebody holds a slice of it."""

    def __init__(self, device: torch.device) -> None:
        """`device`: whose tensors will be copied; a GPU makes the memory pinned."""
        self._device = device
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._coming: Future[Tensor] | None = None

    def reserve(self, num_bytes: int) -> None:
        """Begin to make room in the background. Returns at once."""
        assert self._coming is None and self._bytes.numel() == 0
        pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pin")
        self._coming = pool.submit(_make, num_bytes, self._device)
        pool.shutdown(wait=False)

    def bytes(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], the same memory every time as long as it is large enough."""
        if self._coming is not None:
            self._bytes, self._coming = self._coming.result(), None
        if self._bytes.numel() < num_bytes:
            _drop(self._bytes, self._device)
            self._bytes = _make(num_bytes, self._device)
        return self._bytes[:num_bytes]


def _make(num_bytes: int, device: torch.device) -> Tensor:
    buffer = torch.empty(num_bytes, dtype=torch.uint8)
    if device.type == "cuda":
        with ThreadPoolExecutor(max_workers=NUM_TOUCHING) as pool:  # every page, once
            list(pool.map(torch.Tensor.zero_, buffer.tensor_split(NUM_TOUCHING)))
        torch.cuda.set_device(device)
        status = _cudart().cudaHostRegister(buffer.data_ptr(), num_bytes, 0)
        if int(status) != 0:
            logger.warning(
                f"cannot pin {num_bytes / 1024**3:.1f} GiB of host memory (CUDA error {int(status)}): sleeping and "
                "waking will be several times slower; raise the limit of locked memory (ulimit -l)"
            )
    return buffer


def _drop(buffer: Tensor, device: torch.device) -> None:
    if device.type == "cuda" and buffer.numel() > 0:
        _cudart().cudaHostUnregister(buffer.data_ptr())


def _cudart() -> Any:
    return torch.cuda.cudart()
