"""The policy's weights as engines want them: whole tensors in the compute dtype, a bucket at a time. Called by `sync/`.

Works awake and asleep: asleep, only one bucket's shards are on the device at a time.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlkit.backends.fsdp.model import ScoringModel, local_shard, named_persistent_buffers, named_shards
from rlkit.dist.collectives import gather_over_data
from rlkit.dist.groups import RankMesh
from rlkit.types.weights import WeightBucket, WeightSpec

PART_ALIGNMENT = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """One tensor on its way: what comes out, and this rank's part of it."""

    spec: WeightSpec
    local: Tensor
    rows_per_rank: int
    """Rows of every rank's part, the last ones padded; 0 where the tensor is whole on every rank."""

    @property
    def bytes_per_rank(self) -> int:
        """Bytes of every rank's part."""
        return self.spec.num_bytes // self.spec.shape[0] * self.rows_per_rank if self.rows_per_rank else 0

    @property
    def room_per_rank(self) -> int:
        """The same, rounded up so that the next part starts where any dtype may start."""
        return _round_up(self.bytes_per_rank, PART_ALIGNMENT)


class FsdpWeights:
    """A `WeightSource` over the shards of one model."""

    def __init__(
        self,
        model: ScoringModel,
        mesh: RankMesh,
        *,
        dtype_of: torch.dtype | Mapping[str, torch.dtype],
        read: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> None:
        """`dtype_of`: what parameters are cast to, for all or by name. `read` finds the values of a shard, also
        while it is away.
        """
        self._mesh = mesh
        self._read = read
        self._entries = [
            _entry(name, shard, dtype_of if isinstance(dtype_of, torch.dtype) else dtype_of[name], mesh)
            for name, shard in [*named_shards(model), *named_persistent_buffers(model)]
        ]

    def specs(self) -> list[WeightSpec]:
        return [entry.spec for entry in self._entries]

    @torch.no_grad()
    def buckets(self, max_bytes: int) -> Iterator[WeightBucket]:
        """See `WeightSource`. Collective: one gather a bucket."""
        plan = list(_fill_buckets(self._entries, max_bytes))
        largest = max((offsets[-1] + entries[-1].spec.num_bytes for entries, offsets in plan), default=0)
        flat = torch.empty(largest, dtype=torch.uint8, device=self._mesh.device)
        for entries, offsets in plan:
            used = flat[: offsets[-1] + entries[-1].spec.num_bytes]
            self._gather(entries, offsets, used)
            yield WeightBucket(specs=[entry.spec for entry in entries], offsets=offsets, flat=used)

    def _gather(self, entries: list[_Entry], offsets: list[int], flat: Tensor) -> None:
        """Cast this rank's parts, gather them from all ranks, and put each tensor's rows in order into `flat`."""
        parts = flat.new_empty(sum(entry.room_per_rank for entry in entries))
        start = 0
        for entry, offset in zip(entries, offsets, strict=True):
            local = self._read(entry.local)
            if entry.rows_per_rank == 0:
                target = flat[offset : offset + entry.spec.num_bytes]
            else:
                target = parts[start : start + local.numel() * entry.spec.dtype.itemsize]
                start += entry.room_per_rank
            target.view(entry.spec.dtype).copy_(local.reshape(-1))
        if parts.numel() == 0:
            return
        gathered = gather_over_data(parts, self._mesh)
        start = 0
        for entry, offset in zip(entries, offsets, strict=True):
            size = entry.bytes_per_rank
            for rank in range(gathered.shape[0] if size else 0):
                first = min(rank * size, entry.spec.num_bytes)
                count = min(size, entry.spec.num_bytes - first)
                flat[offset + first : offset + first + count].copy_(gathered[rank, start : start + count])
            start += entry.room_per_rank


def _entry(name: str, tensor: Tensor, dtype: torch.dtype, mesh: RankMesh) -> _Entry:
    """A shard is cast to `dtype`. A buffer, or a shard of a lone rank, is whole already; a buffer also keeps its
    dtype.
    """
    is_shard = isinstance(tensor, DTensor)
    spec = WeightSpec(name=name, shape=tuple(tensor.shape), dtype=dtype if is_shard else tensor.dtype)
    rows = -(-tensor.shape[0] // mesh.data_size) if is_shard and mesh.data_size > 1 else 0
    return _Entry(spec=spec, local=local_shard(tensor) if isinstance(tensor, DTensor) else tensor, rows_per_rank=rows)


def _fill_buckets(entries: list[_Entry], max_bytes: int) -> Iterator[tuple[list[_Entry], list[int]]]:
    """Consecutive tensors and their byte offsets, at most `max_bytes` together; a larger tensor is alone."""
    chosen: list[_Entry] = []
    offsets: list[int] = []
    end = 0
    for entry in entries:
        start = _round_up(end, entry.spec.dtype.itemsize)
        if chosen and start + entry.spec.num_bytes > max_bytes:
            yield chosen, offsets
            chosen, offsets, start = [], [], 0
        chosen.append(entry)
        offsets.append(start)
        end = start + entry.spec.num_bytes
    if chosen:
        yield chosen, offsets


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
