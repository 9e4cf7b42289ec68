"""Which tokens of a packed row each context-parallel rank holds. Called by the backends.

A row of T tokens, padded to a multiple of the `cp` ranks, is cut into 2 cp pieces. Rank r holds piece r and piece
2 cp - 1 - r (zigzag), so that cheap early queries and dear late ones even out under causal attention. The front pieces
may be one token longer than the back ones, which is why `cp - 1` padding tokens are always enough.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise

import torch
from torch import Tensor

from rlkit.types.batches import PackedBatch


def num_padding_tokens(num_tokens: int, multiple: int) -> int:
    """Tokens that bring `num_tokens` up to the next multiple: 0 to `multiple` - 1."""
    return -num_tokens % multiple


def pad_row(batch: PackedBatch, num_tokens: int) -> PackedBatch:
    """The batch with a sequence of `num_tokens` untrained tokens behind the others; itself where that is none."""
    if num_tokens == 0:
        return batch
    longer: dict[str, Tensor] = {}
    for item in fields(batch):
        value = getattr(batch, item.name)
        if isinstance(value, Tensor) and item.name.endswith(("_T", "_S")):
            longer[item.name] = torch.cat([value, value.new_zeros(num_tokens if item.name.endswith("_T") else 1)])
    longer["positions_T"][-num_tokens:] = torch.arange(num_tokens)
    longer["sample_ids_S"][-1] = -1
    longer["cu_seqlens"] = torch.cat([batch.cu_seqlens, batch.cu_seqlens[-1:] + num_tokens])
    return replace(batch, max_seqlen=max(batch.max_seqlen, num_tokens), **longer)


def held_ranges(num_tokens: int, *, cp: int, rank: int) -> tuple[range, range]:
    """The two stretches of a row that `rank` holds, ascending; the second may be empty. `num_tokens` is padded."""
    assert num_tokens % cp == 0 and 0 <= rank < cp
    held = num_tokens // cp
    front = -(-held // 2)
    back = held - front
    end = num_tokens - rank * back
    return range(rank * front, (rank + 1) * front), range(end - back, end)


def held_positions(num_tokens: int, *, cp: int, rank: int) -> list[int]:
    """Positions in the row of the tokens that `rank` holds, in the order in which it holds them."""
    front, back = held_ranges(num_tokens, cp=cp, rank=rank)
    return [*front, *back]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Consecutive queries and the keys that they see: those of the row from the start of the first query's sequence to
    the last query.
    """

    queries: range
    keys: range
    query_lengths: tuple[int, ...]
    """Queries of each sequence that the stretch touches."""
    key_lengths: tuple[int, ...]
    """Keys of each: as many as there are tokens from its start to its last query here. Causal attention is aligned at
    the ends.
    """


def stretch_of(queries: range, bounds: Sequence[int]) -> Stretch:
    """`bounds`: the cumulative lengths [S + 1] of the row's sequences. `queries` is not empty."""
    assert queries
    touched = [
        (max(start, queries.start), start, min(end, queries.stop))
        for start, end in pairwise(bounds)
        if start < queries.stop and end > queries.start and start < end
    ]
    return Stretch(
        queries=queries,
        keys=range(touched[0][1], queries.stop),
        query_lengths=tuple(end - first for first, _, end in touched),
        key_lengths=tuple(end - start for _, start, end in touched),
    )


def scored_by(scored: Sequence[int], num_tokens: int, *, cp: int, rank: int) -> list[int]:
    """The `scored` tokens whose log-prob `rank` computes: it holds the position before each."""
    held = held_ranges(num_tokens, cp=cp, rank=rank)
    return [token for token in scored if any(token - 1 in part for part in held)]
