"""The policy's weights as engines want them: whole tensors in the compute dtype, a bucket at a time. Called by `sync/`.

Works awake and asleep: asleep, only one bucket's shards are on the device at a time.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlkit.backends.fsdp.lora import factor_names, is_adapter, merged_rows
from rlkit.backends.fsdp.model import (
    ScoringModel,
    base_shards,
    local_shard,
    named_persistent_buffers,
    named_shards,
)
from rlkit.dist.collectives import gather_over_shards, gather_rows
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
    b_rows: Tensor | None = None
    """This rank's rows of the adapter's B, where there is an adapter: what comes out is W + s B A."""

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
        lora_scaling: float = 0.0,
    ) -> None:
        """`dtype_of`: what parameters are cast to, for all or by name. `read` finds the values of a shard, also
        while it is away. `lora_scaling`: s of the adapters, if there are any.
        """
        self._mesh = mesh
        self._read = read
        self._scaling = lora_scaling
        adapters = {name: local_shard(shard) for name, shard in named_shards(model) if is_adapter(name)}
        self._a_shards = {name: shard for name, shard in named_shards(model) if ".lora_A." in name}
        self._whole_a: dict[str, Tensor] = {}
        self._entries = [
            _entry(
                name,
                shard,
                dtype_of if isinstance(dtype_of, torch.dtype) else dtype_of[name],
                mesh,
                b_rows=adapters.get(factor_names(name)[1]),
            )
            for name, shard in [*base_shards(model), *named_persistent_buffers(model)]
        ]

    def specs(self) -> list[WeightSpec]:
        return [entry.spec for entry in self._entries]

    @torch.no_grad()
    def buckets(self, max_bytes: int) -> Iterator[WeightBucket]:
        """See `WeightSource`. Collective: one gather a bucket.

        On CUDA there are two buffers and a stream of its own: while the caller consumes a bucket, the next one is
        copied, cast and gathered. Both buffers live as long as the iterator.
        """
        self._whole_a = {  # a few megabytes
            name: gather_rows(self._read(local_shard(shard)), shard.shape[0], self._mesh)
            for name, shard in self._a_shards.items()
        }
        plan = list(_fill_buckets(self._entries, max_bytes))
        staging = _Staging(self._mesh.device, [(self._host_bytes(entries), size) for entries, _, size in plan])
        for index in range(len(plan)):
            if index == 0 or not staging.is_double:
                self._launch(plan[index], staging, index)
            staging.wait(index)
            if staging.is_double and index + 1 < len(plan):
                self._launch(plan[index + 1], staging, index + 1)
            entries, offsets, size = plan[index]
            yield WeightBucket(
                specs=[entry.spec for entry in entries], offsets=offsets, flat=staging.buffer(index, size)
            )
        self._whole_a = {}

    def _merged(self, entry: _Entry, local: Tensor) -> Tensor:
        if entry.b_rows is None:
            return local
        a = self._whole_a[factor_names(entry.spec.name)[0]]
        return merged_rows(local, self._read(entry.b_rows).to(local.device), a, self._scaling)

    def _launch(self, filled: "_Filled", staging: "_Staging", index: int) -> None:
        """Queue everything that makes one bucket; on CUDA it is done only after `staging.wait(index)`."""
        entries, offsets, size = filled
        with staging.producing(index):
            self._gather(entries, offsets, staging.buffer(index, size), staging)

    def _host_bytes(self, entries: list[_Entry]) -> int:
        """Bytes that one bucket's parts take while they lie on the host, and so in device staging; 0 when awake."""
        away = [self._read(entry.local) for entry in entries]
        return sum(_round_up(part.numel() * part.itemsize, PART_ALIGNMENT) for part in away if part.is_cpu)

    def _gather(self, entries: list[_Entry], offsets: list[int], flat: Tensor, staging: "_Staging") -> None:
        """Cast this rank's parts, gather them from all ranks, and put each tensor's rows in order into `flat`. A lone
        rank casts straight into `flat`.
        """
        parts = flat.new_empty(sum(entry.room_per_rank for entry in entries))
        start = 0
        staging.rewind()
        for entry, offset in zip(entries, offsets, strict=True):
            local = self._merged(entry, staging.on_device(self._read(entry.local)))
            if entry.rows_per_rank == 0:
                target = flat[offset : offset + entry.spec.num_bytes]
            else:
                target = parts[start : start + local.numel() * entry.spec.dtype.itemsize]
                start += entry.room_per_rank
            target.view(entry.spec.dtype).copy_(local.reshape(-1))
        if parts.numel() == 0:
            return
        gathered = gather_over_shards(parts, self._mesh)
        start = 0
        for entry, offset in zip(entries, offsets, strict=True):
            size = entry.bytes_per_rank
            for rank in range(gathered.shape[0] if size else 0):
                first = min(rank * size, entry.spec.num_bytes)
                count = min(size, entry.spec.num_bytes - first)
                flat[offset + first : offset + first + count].copy_(gathered[rank, start : start + count])
            start += entry.room_per_rank


class _Staging:
    """Device memory of one pass over the buckets: the buffers that are handed out, and room for parts that come from
    pinned host memory in the dtype of the master weights.

    Copying first and casting on the GPU matters: `copy_` from the host into another dtype casts on the CPU and then
    copies from pageable memory.
    """

    def __init__(self, device: torch.device, sizes: list[tuple[int, int]]) -> None:
        """`sizes`: (bytes on the host, bytes handed out) of each bucket."""
        self._is_cuda = device.type == "cuda"
        self.is_double = self._is_cuda and len(sizes) > 1
        largest = max((size for _, size in sizes), default=0)
        self._buffers = [
            torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(2 if self.is_double else 1)
        ]
        host_bytes = max((host for host, _ in sizes), default=0) if self._is_cuda else 0
        self._raw = torch.empty(host_bytes, dtype=torch.uint8, device=device)
        self._used = 0
        self._stream = torch.cuda.Stream(device) if self._is_cuda else None
        self._ready = [torch.cuda.Event() for _ in self._buffers] if self._is_cuda else []

    def buffer(self, index: int, size: int) -> Tensor:
        """The memory of bucket `index`; the bucket after the next has the same."""
        return self._buffers[index % len(self._buffers)][:size]

    @contextmanager
    def producing(self, index: int) -> Iterator[None]:
        """What is queued inside makes bucket `index`."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield
            self._ready[index % len(self._ready)].record(self._stream)

    def wait(self, index: int) -> None:
        """Until bucket `index` is complete."""
        if self._ready:
            self._ready[index % len(self._ready)].synchronize()

    def rewind(self) -> None:
        """Begin a bucket: the stream's order keeps the previous one's room until it has been cast."""
        self._used = 0

    def on_device(self, part: Tensor) -> Tensor:
        """The values of `part` on the device, in its own dtype."""
        if not self._is_cuda or part.is_cuda:
            return part
        size = part.numel() * part.itemsize
        room = self._raw[self._used : self._used + size].view(part.dtype).view(part.shape)
        self._used += _round_up(size, PART_ALIGNMENT)
        return room.copy_(part, non_blocking=True)


_Filled = tuple[list[_Entry], list[int], int]
"""Entries of a bucket, their byte offsets, and the bytes of all together."""


def _entry(name: str, tensor: Tensor, dtype: torch.dtype, mesh: RankMesh, *, b_rows: Tensor | None) -> _Entry:
    """A shard is cast to `dtype`. A buffer, or a shard of a lone rank, is whole already; a buffer also keeps its
    dtype.
    """
    is_shard = isinstance(tensor, DTensor)
    spec = WeightSpec(name=name, shape=tuple(tensor.shape), dtype=dtype if is_shard else tensor.dtype)
    rows = -(-tensor.shape[0] // mesh.shard_size) if is_shard and mesh.shard_size > 1 else 0
    local = local_shard(tensor) if isinstance(tensor, DTensor) else tensor
    return _Entry(spec=spec, local=local, rows_per_rank=rows, b_rows=b_rows)


def _fill_buckets(entries: list[_Entry], max_bytes: int) -> Iterator[_Filled]:
    """Consecutive tensors, at most `max_bytes` together; a larger tensor is alone."""
    chosen: list[_Entry] = []
    offsets: list[int] = []
    end = 0
    for entry in entries:
        start = _round_up(end, entry.spec.dtype.itemsize)
        if chosen and start + entry.spec.num_bytes > max_bytes:
            yield chosen, offsets, end
            chosen, offsets, start = [], [], 0
        chosen.append(entry)
        offsets.append(start)
        end = start + entry.spec.num_bytes
    if chosen:
        yield chosen, offsets, end


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
