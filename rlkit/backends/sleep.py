"""Moves tensors to host memory and back, bit for bit, without any of their owners noticing. Called by `backend.py`: on
CUDA to sleep and wake, everywhere to save from a copy.

A tensor keeps its identity: its storage shrinks to nothing while it is away. So parameters, the views that FSDP2 keeps
of them and optimizer state need no rewiring. Invariant: between `offload` and `restore` nobody reads the tensors except
through `host_view`.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage

from rlkit.backends.host_buffer import HostBuffer

ALIGNMENT = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """Where the bytes of one storage lie."""

    storage: UntypedStorage
    device_bytes: Tensor  # uint8 view of the whole storage
    host_bytes: Tensor  # uint8 slice of the host buffer, of the same size


@dataclass(frozen=True, kw_only=True, slots=True)
class Copied:
    """What a move took."""

    num_bytes: int
    seconds: float

    @property
    def gb_per_s(self) -> float:
        return self.num_bytes / max(self.seconds, 1e-9) / 1e9


class HostSwap:
    """A flat host buffer that is kept from one sleep to the next, and a stream for the copies."""

    def __init__(self, device: torch.device) -> None:
        """`device`: where the tensors live."""
        self._buffer = HostBuffer(device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._held: dict[int, _Place] = {}
        self._is_away = False

    @property
    def is_away(self) -> bool:
        return self._is_away

    def reserve(self, num_bytes: int) -> None:
        """Make room in the background: the first touch of many gigabytes takes seconds."""
        self._buffer.reserve(num_bytes)

    def offload(self, tensors: Iterable[Tensor]) -> Copied:
        """Copy the storages of `tensors` (plain tensors, no DTensors) to the host and free them."""
        copied = self.hold(tensors)
        for place in self._held.values():
            place.storage.resize_(0)
        self._is_away = True
        return copied

    def restore(self) -> Copied:
        """Give every storage its memory and its bytes back."""
        assert self._is_away or not self._held, "restore called on a copy that was only held"
        start = time.perf_counter()
        for place in self._held.values():
            place.storage.resize_(place.host_bytes.numel())
        with self._copying():
            for place in self._held.values():
                place.device_bytes.copy_(place.host_bytes, non_blocking=True)
        return self._done(start)

    def hold(self, tensors: Iterable[Tensor]) -> Copied:
        """Copy without freeing: `host_view` then shows the values of this moment, until `release`."""
        assert not self._held, "the host buffer is in use"
        start = time.perf_counter()
        storages = _storages(tensors)
        self._held = dict(zip(storages, self._assign(list(storages.values())), strict=True))
        with self._copying():
            for place in self._held.values():
                place.host_bytes.copy_(place.device_bytes, non_blocking=True)
        num_bytes = sum(place.host_bytes.numel() for place in self._held.values())
        return Copied(num_bytes=num_bytes, seconds=time.perf_counter() - start)

    def release(self) -> None:
        """Forget what was held; the buffer may be written again."""
        assert not self._is_away
        self._held = {}

    def host_view(self, tensor: Tensor) -> Tensor:
        """The values of a tensor that is away or held, as a CPU tensor of the same shape; else the tensor itself."""
        place = self._held.get(tensor.untyped_storage()._cdata)
        if place is None:
            return tensor
        start = tensor.storage_offset() * tensor.element_size()
        flat = place.host_bytes[start:].view(torch.uint8)
        whole = flat[: flat.numel() // tensor.element_size() * tensor.element_size()].view(tensor.dtype)
        return whole.as_strided(tensor.shape, tensor.stride(), whole.storage_offset())

    def _done(self, start: float) -> Copied:
        num_bytes = sum(place.host_bytes.numel() for place in self._held.values())
        self._held, self._is_away = {}, False
        return Copied(num_bytes=num_bytes, seconds=time.perf_counter() - start)

    @contextmanager
    def _copying(self) -> Iterator[None]:
        """Copies inside run on their own stream, after what was asked of the GPU before; all are done at the end."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    def _assign(self, storages: list[UntypedStorage]) -> list[_Place]:
        """Lay the storages one after the other into the buffer."""
        buffer = self._buffer.bytes(_end(storages))
        places: list[_Place] = []
        start = 0
        for storage in storages:
            places.append(
                _Place(
                    storage=storage,
                    device_bytes=torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage),
                    host_bytes=buffer[start : start + storage.nbytes()],
                )
            )
            start += _aligned(storage.nbytes())
        return places


def _storages(tensors: Iterable[Tensor]) -> dict[int, UntypedStorage]:
    """Each storage once, by its identity; empty ones left out."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return {key: storage for key, storage in storages.items() if storage.nbytes() > 0}


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _end(storages: Iterable[UntypedStorage]) -> int:
    return sum(_aligned(storage.nbytes()) for storage in storages)
