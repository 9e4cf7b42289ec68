"""Moves tensors to host memory and back, bit for bit, without any of their owners noticing. Called by `backend.py` on
CUDA.

A tensor keeps its identity: its storage shrinks to nothing while it is away. So parameters, the views that FSDP2 keeps
of them and optimizer state need no rewiring. Invariant: between `offload` and `restore` nobody reads the tensors except
through `host_view`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage

CHUNK_BYTES = 256 * 1024 * 1024
"""Host buffers come in this size: torch rounds pinned allocations up to a power of two, so one big one could waste
half of it.
"""

ALIGNMENT = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """Where the bytes of one storage lie."""

    storage: UntypedStorage
    device_bytes: Tensor  # uint8 view of the whole storage
    host_bytes: Tensor  # uint8 slice of a host buffer, of the same size


class HostSwap:
    """Flat host buffers (pinned where there is a GPU) that are kept from one sleep to the next."""

    def __init__(self) -> None:
        self._chunks: list[Tensor] = []
        self._away: dict[int, _Place] = {}

    @property
    def is_away(self) -> bool:
        return bool(self._away)

    def offload(self, tensors: Iterable[Tensor]) -> int:
        """Copy the storages of `tensors` (plain tensors, no DTensors) to the host and free them. Returns the bytes
        moved.
        """
        assert not self._away, "offload called twice without restore"
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        storages = {key: storage for key, storage in storages.items() if storage.nbytes() > 0}
        places = self._assign(list(storages.values()))
        for place in places:
            place.host_bytes.copy_(place.device_bytes, non_blocking=True)
        if any(place.device_bytes.is_cuda for place in places):
            torch.cuda.synchronize()
        for key, place in zip(storages, places, strict=True):
            self._away[key] = place
            place.storage.resize_(0)
        return sum(place.host_bytes.numel() for place in places)

    def restore(self) -> None:
        """Give every storage its memory and its bytes back."""
        for place in self._away.values():
            place.storage.resize_(place.host_bytes.numel())
            place.device_bytes.copy_(place.host_bytes, non_blocking=True)
        if any(place.device_bytes.is_cuda for place in self._away.values()):
            torch.cuda.synchronize()
        self._away.clear()

    def host_view(self, tensor: Tensor) -> Tensor:
        """The values of a tensor that is away, as a CPU tensor of the same shape; the tensor itself when it is not."""
        place = self._away.get(tensor.untyped_storage()._cdata)
        if place is None:
            return tensor
        start = tensor.storage_offset() * tensor.element_size()
        flat = place.host_bytes[start:].view(torch.uint8)
        whole = flat[: flat.numel() // tensor.element_size() * tensor.element_size()].view(tensor.dtype)
        return whole.as_strided(tensor.shape, tensor.stride(), whole.storage_offset())

    def _assign(self, storages: list[UntypedStorage]) -> list[_Place]:
        """Lay the storages one after the other into the chunks, which grow in number as needed."""
        places: list[_Place] = []
        chunk, start = 0, 0
        for storage in storages:
            size = storage.nbytes()
            while chunk < len(self._chunks) and start + size > self._chunks[chunk].numel():
                chunk, start = chunk + 1, 0
            if chunk == len(self._chunks):
                pinned = storage.device.type == "cuda"
                self._chunks.append(torch.empty(max(size, CHUNK_BYTES), dtype=torch.uint8, pin_memory=pinned))
            places.append(
                _Place(
                    storage=storage,
                    device_bytes=torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage),
                    host_bytes=self._chunks[chunk][start : start + size],
                )
            )
            start += -(-size // ALIGNMENT) * ALIGNMENT
        return places
