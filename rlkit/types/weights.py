"""Weights on their way from a trainer to engines: read from a `WeightSource` (backends), carried by a `WeightChannel`
(sync).

Names are Hugging Face parameter names. A tied tensor appears once, under the name that is loaded (never
`lm_head.weight` beside its twin).
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSpec:
    name: str
    shape: tuple[int, ...]
    dtype: dtype
    """The dtype that engines receive: the compute dtype of the trainer's forward."""

    @property
    def num_bytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightBucket:
    """A few whole tensors, flattened one after the other into bytes. `flat` is reused for the next bucket: consume it
    before asking for more."""

    specs: list[WeightSpec]
    offsets: list[int]
    """Byte offset of each tensor in `flat`."""
    flat: Tensor  # uint8 [sum of num_bytes], on the trainer's device

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, view into `flat`) in order."""
        for spec, start in zip(self.specs, self.offsets, strict=True):
            yield spec.name, self.flat[start : start + spec.num_bytes].view(spec.dtype).view(spec.shape)


class WeightSource(Protocol):
    """Read-only view of a backend's weights."""

    def specs(self) -> list[WeightSpec]:
        """Every tensor that engines need, in the order of `buckets`. Not collective."""
        ...

    def buckets(self, max_bytes: int) -> Iterator[WeightBucket]:
        """Full tensors in buckets of at most `max_bytes` (a larger tensor travels alone).

        Collective: every rank iterates to the end and sees the same buckets. Works awake and asleep.
        """
        ...


def tensor_checksum(tensor: Tensor) -> str:
    """SHA-256 of the tensor's bytes in row-major order, as hex; trainers and the embedded engine compare by it."""
    # a copy: `.numpy()` on the tensor itself would make its storage unresizable for ever, and sleep frees by resizing
    data = tensor.detach().contiguous().view(-1).view(torch.uint8).to("cpu", copy=True).numpy()
    return hashlib.sha256(data.tobytes()).hexdigest()
