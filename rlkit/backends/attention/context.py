"""Attention of one context-parallel rank: its own queries against the keys and values of the whole packed row.

Keys and values are gathered (one collective a layer and direction); under grouped-query attention they are a fraction
of the queries, and no rank waits for a ring of others. Each rank holds two stretches of the row
(`algo.context_shards`); for each, the keys that its queries see are consecutive too, so a variable-length kernel serves
it in one call, causal and aligned at the sequences' ends.

Shapes: T tokens of the row, c of this rank, H query heads, K key/value heads, D head size, n sequences of a stretch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from rlkit.algo.context_shards import held_positions, held_ranges, stretch_of
from rlkit.dist.context import gather_tokens

MAX_SCORES = 1 << 26
"""Entries of the dense path's mask that are made at a time."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DeviceStretch:
    """A `Stretch` as kernels want it."""

    queries: slice
    """Among this rank's tokens."""
    keys: slice
    """In the row."""
    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    cu_queries: Tensor  # int32 [n+1]
    cu_keys: Tensor  # int32 [n+1]

    @property
    def max_queries(self) -> int:
        return max(self.query_lengths)

    @property
    def max_keys(self) -> int:
        return max(self.key_lengths)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ContextLayout:
    """Which part of a packed row this rank holds. Made on the CPU once a micro-batch."""

    group: ProcessGroup | None
    """None where the ranks of a row are computed one after the other."""
    stretches: tuple[DeviceStretch, ...]
    positions: Tensor  # int64 [c]; position in the row of each token of this rank
    order: Tensor  # int64 [T]; where each token of the row lies when all ranks' parts are laid end to end
    local_of_row: Tensor  # int64 [T]; index among this rank's tokens, -1 elsewhere

    def to(self, device: torch.device) -> "ContextLayout":
        return replace(
            self,
            stretches=tuple(
                replace(
                    part,
                    cu_queries=part.cu_queries.to(device, non_blocking=True),
                    cu_keys=part.cu_keys.to(device, non_blocking=True),
                )
                for part in self.stretches
            ),
            positions=self.positions.to(device, non_blocking=True),
            order=self.order.to(device, non_blocking=True),
            local_of_row=self.local_of_row.to(device, non_blocking=True),
        )


def context_layout(bounds: Sequence[int], *, cp: int, rank: int, group: ProcessGroup | None) -> ContextLayout:
    """`bounds`: cumulative lengths [S + 1] of the row's sequences, the last one a multiple of `cp`."""
    num_tokens = bounds[-1]
    stretches, offset = [], 0
    for queries in held_ranges(num_tokens, cp=cp, rank=rank):
        if queries:
            part = stretch_of(queries, bounds)
            stretches.append(
                DeviceStretch(
                    queries=slice(offset, offset + len(queries)),
                    keys=slice(part.keys.start, part.keys.stop),
                    query_lengths=part.query_lengths,
                    key_lengths=part.key_lengths,
                    cu_queries=_cumulative(part.query_lengths),
                    cu_keys=_cumulative(part.key_lengths),
                )
            )
            offset += len(queries)
    everyone = torch.tensor([held_positions(num_tokens, cp=cp, rank=r) for r in range(cp)], dtype=torch.int64).flatten()
    positions = everyone.view(cp, -1)[rank].clone()
    order = torch.empty_like(everyone)
    order[everyone] = torch.arange(num_tokens)
    local_of_row = torch.full((num_tokens,), -1, dtype=torch.int64)
    local_of_row[positions] = torch.arange(len(positions))
    return ContextLayout(
        group=group, stretches=tuple(stretches), positions=positions, order=order, local_of_row=local_of_row
    )


def _cumulative(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


AttendStretch = Callable[[Tensor, Tensor, Tensor, DeviceStretch, float, int | None], Tensor]
"""(query [q, H, D], key [k, K, D], value [k, K, D], stretch, softmax scale, window) -> [q, H, D]."""


def attend_in_context(
    q: Tensor, k: Tensor, v: Tensor, context: ContextLayout, scale: float, window: int | None, kernel: AttendStretch
) -> Tensor:
    """[c, H, D] queries and [c, K, D] keys and values of this rank -> [c, H, D]. Collective over the context group."""
    assert context.group is not None
    both = gather_tokens(torch.cat([k, v], dim=1), context.order, context.group)
    k_row, v_row = both.split([k.shape[1], v.shape[1]], dim=1)
    return attend_stretches(q, k_row, v_row, context, scale, window, kernel)


def attend_stretches(
    q: Tensor,
    k_row: Tensor,
    v_row: Tensor,
    context: ContextLayout,
    scale: float,
    window: int | None,
    kernel: AttendStretch,
) -> Tensor:
    """The same with the row's keys and values [T, K, D] at hand."""
    outputs = [
        kernel(q[part.queries], k_row[part.keys], v_row[part.keys], part, scale, window) for part in context.stretches
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def dense_stretch(q: Tensor, k: Tensor, v: Tensor, stretch: DeviceStretch, scale: float, window: int | None) -> Tensor:
    """One sequence after the other through torch's SDPA, some queries at a time so that no mask grows large. Any
    device, any dtype.
    """
    outputs = []
    queries = q.split(stretch.query_lengths)
    keys, values = k.split(stretch.key_lengths), v.split(stretch.key_lengths)
    for query, key, value in zip(queries, keys, values, strict=True):
        num_queries, num_keys = query.shape[0], key.shape[0]
        step = max(1, MAX_SCORES // num_keys)
        for start in range(0, num_queries, step):
            rows = query[start : start + step]
            first = num_keys - num_queries + start  # key that the first of these queries sees last
            seen = first + rows.shape[0]
            distance = (
                torch.arange(first, seen, device=q.device)[:, None] - torch.arange(seen, device=q.device)[None, :]
            )
            visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
            attended = F.scaled_dot_product_attention(
                rows.transpose(0, 1)[None],
                key[:seen].transpose(0, 1)[None],
                value[:seen].transpose(0, 1)[None],
                attn_mask=visible,
                scale=scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
            outputs.append(attended[0].transpose(0, 1))
    return torch.cat(outputs)
