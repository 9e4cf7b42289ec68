"""The policy's weights under Hugging Face names: whole tensors, a bucket at a time. Called by `sync/` and for exports.

A tensor is gathered over the tensor-parallel ranks that hold its parts, handed to the other expert ranks where it is an
expert's, and then to the other pipeline stages. Works awake and asleep.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from rlkit.backends.megatron.loading import is_mine, model_entries, tensor_axis
from rlkit.backends.megatron.model import Model
from rlkit.backends.megatron.names import Entry, Piece
from rlkit.backends.megatron.parallel import Axis, Ranks
from rlkit.types.weights import WeightBucket, WeightSpec


class MegatronWeights:
    """A `WeightSource` over one model."""

    def __init__(
        self,
        model: Model,
        ranks: Ranks,
        *,
        local: Callable[[Entry], Tensor],
        dtype_of: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        """`local`: this rank's values of a parameter that it holds, wherever they lie. `dtype_of`: by name, what
        tensors are cast to; by default the compute dtype.
        """
        self._model = model
        self._ranks = ranks
        self._local = local
        self._entries = [entry for entry in model_entries(model, ranks) if not entry.is_copy]
        self._specs = [
            WeightSpec(name=piece.name, shape=piece.shape, dtype=self._dtype(piece, dtype_of))
            for entry in self._entries
            for piece in entry.pieces
        ]

    def _dtype(self, piece: Piece, dtype_of: Mapping[str, torch.dtype] | None) -> torch.dtype:
        if dtype_of is not None:
            return dtype_of[piece.name]
        return torch.float32 if piece.is_float32 else self._model.dtype

    def specs(self) -> list[WeightSpec]:
        return self._specs

    @torch.no_grad()
    def buckets(self, max_bytes: int) -> Iterator[WeightBucket]:
        """See `WeightSource`. Collective over all ranks."""
        plan = list(fill_buckets(self._specs, max_bytes))
        flat = torch.empty(max((size for *_, size in plan), default=0), dtype=torch.uint8, device=self._ranks.device)
        tensors = self._whole_tensors()
        for specs, offsets, size in plan:
            for spec, start in zip(specs, offsets, strict=True):
                target = flat[start : start + spec.num_bytes].view(spec.dtype).view(spec.shape)
                target.copy_(next(tensors))
            yield WeightBucket(specs=specs, offsets=offsets, flat=flat[:size])

    def _whole_tensors(self) -> Iterator[Tensor]:
        """In the order of the specs, on every rank."""
        specs = iter(self._specs)
        for entry in self._entries:
            mine = is_mine(entry, self._model, self._ranks)
            parts = entry.unpack(self._local(entry).to(self._ranks.device)) if mine else None
            for number, piece in enumerate(entry.pieces):
                spec = next(specs)
                if parts is not None:
                    axis = tensor_axis(entry, self._ranks)
                    whole = _gather(parts[number].to(spec.dtype), piece, axis)
                else:
                    whole = torch.empty(spec.shape, dtype=spec.dtype, device=self._ranks.device)
                self._hand_over(whole, entry)
                yield whole

    def _hand_over(self, whole: Tensor, entry: Entry) -> None:
        """From the ranks that hold it to all others."""
        ranks = self._ranks
        if entry.expert is not None and ranks.expert.size > 1 and entry.stage == ranks.pipeline.rank:
            assert self._model.architecture.experts is not None
            owner = entry.expert * ranks.expert.size // self._model.architecture.experts.num_experts
            dist.broadcast(whole, group=ranks.expert.group, group_src=owner)
        if ranks.pipeline.size > 1:
            dist.broadcast(whole, group=ranks.pipeline.group, group_src=entry.stage)


def _gather(part: Tensor, piece: Piece, axis: Axis) -> Tensor:
    """The whole tensor on every rank of the axis. Collective over it."""
    if piece.axis is None or axis.size == 1:
        return part[: piece.shape[0]].contiguous()
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(axis.size)]
    dist.all_gather(parts, part.contiguous(), group=axis.group)
    return torch.cat(parts, dim=piece.axis).narrow(piece.axis, 0, piece.shape[piece.axis]).contiguous()


def fill_buckets(specs: list[WeightSpec], max_bytes: int) -> Iterator[tuple[list[WeightSpec], list[int], int]]:
    """(tensors, byte offsets, bytes of all): consecutive ones, at most `max_bytes` together; a larger one is alone."""
    chosen: list[WeightSpec] = []
    offsets: list[int] = []
    end = 0
    for spec in specs:
        start = -(-end // spec.dtype.itemsize) * spec.dtype.itemsize
        if chosen and start + spec.num_bytes > max_bytes:
            yield chosen, offsets, end
            chosen, offsets, start = [], [], 0
        chosen.append(spec)
        offsets.append(start)
        end = start + spec.num_bytes
    if chosen:
        yield chosen, offsets, end
