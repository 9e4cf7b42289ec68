"""Which samples share a micro-batch, and which rank runs it. Pure Python; called by `batching.py`.

The token cap is strict, so the number of micro-batches is a bin-packing question: best-fit decreasing answers it, and
Karmarkar-Karp (the largest differencing method, 1982) then levels the bins, and lowers their number where that fits.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import count
from operator import itemgetter
from typing import Any

from rlkit.types.batches import StepPlan
from rlkit.types.errors import ConfigError

MAX_ROUNDS_TO_REDUCE = 64
"""With more micro-batches a rank than this, saving one is not worth another round of differencing."""

_Pile = tuple[int, Any]
"""(sum of weights, tree of item numbers): a tree is None, an item, or a pair of trees, so that joining two costs
nothing.
"""


def karmarkar_karp(weights: Sequence[int], num_parts: int) -> list[list[int]]:
    """Deal items into `num_parts` parts of nearly equal weight. Returns item positions, ascending inside each part.

    The two partial solutions of the largest spread are merged, heavy parts onto light ones, until one is left. Each
    item appears once; parts may be empty; the result depends on the input alone. O(n * num_parts) at worst, fast in
    practice.
    """
    assert num_parts > 0
    if not weights or num_parts == 1:
        return [list(range(len(weights)))] + [[] for _ in range(num_parts - 1)]
    ticket = count()
    # a partial solution is the list of its non-empty piles, heaviest first; its spread is heaviest minus lightest
    heap = [(-weight, next(ticket), [(weight, item)]) for item, weight in enumerate(weights)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        piles = _merge(first, heap[0][2], num_parts)
        lightest = piles[-1][0] if len(piles) == num_parts else 0
        heapq.heapreplace(heap, (lightest - piles[0][0], next(ticket), piles))
    parts = [sorted(_items(tree)) for _, tree in heap[0][2]]
    return parts + [[] for _ in range(num_parts - len(parts))]


def _merge(first: list[_Pile], second: list[_Pile], num_parts: int) -> list[_Pile]:
    """Heaviest onto lightest, counting the parts that are empty as lightest of all."""
    overlap = len(first) + len(second) - num_parts
    if overlap <= 0:
        merged = first + second
    else:
        # the `overlap` lightest of each side meet, the heaviest of one with the lightest of the other
        met = zip(first[len(first) - overlap :], reversed(second[len(second) - overlap :]), strict=True)
        merged = first[: len(first) - overlap] + second[: len(second) - overlap]
        merged += [(a[0] + b[0], (a[1], b[1])) for a, b in met]
    merged.sort(key=itemgetter(0), reverse=True)
    return merged


def _items(tree: Any) -> list[int]:
    items: list[int] = []
    stack = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, tuple):
            stack.extend(node)
        else:
            items.append(node)
    return items


def plan_step(lengths: Sequence[int], *, dp: int, max_tokens: int, cp: int = 1) -> StepPlan:
    """Group the samples of one optimizer step into micro-batches and deal these to `dp` ranks.

    `max_tokens` is per GPU; the `cp` ranks of a context-parallel group share a sample, so a micro-batch holds
    `max_tokens * cp`.

    Invariants: (a) each sample appears exactly once; (b) all ranks run equally many micro-batches, and micro-batch j of
    all ranks costs nearly the same; (c) a micro-batch holds at most `max_tokens * cp` tokens, except a longer sample,
    which runs alone; (d) the number of micro-batches is the smallest multiple of `dp` that best-fit decreasing or
    differencing finds; (e) where there are fewer samples than that, some micro-batches are empty; (f) the plan depends
    on the arguments alone.
    """
    if max_tokens < 1:
        raise ConfigError(f"--max-tokens-per-gpu {max_tokens} must be at least 1")
    assert dp > 0 and cp > 0
    cap = max_tokens * cp
    lone = [[sample] for sample, length in enumerate(lengths) if length > cap]
    rest = [sample for sample, length in enumerate(lengths) if length <= cap]
    bins = lone + _pack([lengths[sample] for sample in rest], rest, cap=cap, num_lone=len(lone), dp=dp)
    return _deal(bins, lengths, dp)


def _pack(weights: list[int], samples: list[int], *, cap: int, num_lone: int, dp: int) -> list[list[int]]:
    """Bins of samples that fit. Their number plus `num_lone` is a multiple of `dp`; some may be empty."""

    def aligned(num_bins: int) -> int:
        return -(-(num_bins + num_lone) // dp) * dp - num_lone

    best = best_fit_decreasing(weights, cap)
    num_bins = aligned(len(best))
    best += [[] for _ in range(num_bins - len(best))]
    # two samples above half the cap never share a bin
    lower_bound = aligned(max(-(-sum(weights) // cap), sum(2 * weight > cap for weight in weights)))
    while num_bins > 0:
        parts = karmarkar_karp(weights, num_bins)
        if max(sum(weights[item] for item in part) for part in parts) > cap:
            break
        best = parts
        if num_bins - dp < lower_bound or num_bins > MAX_ROUNDS_TO_REDUCE * dp:
            break
        num_bins -= dp
    return [[samples[item] for item in part] for part in best]


def best_fit_decreasing(weights: Sequence[int], cap: int) -> list[list[int]]:
    """Heaviest first, each into the fullest bin that still takes it. No bin exceeds `cap`, which no weight may; none
    is empty.
    """
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free, bin), ascending
    for item in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        assert weights[item] <= cap
        place = bisect_left(room, (weights[item], -1))
        if place == len(room):
            bins.append([item])
            insort(room, (cap - weights[item], len(bins) - 1))
        else:
            free, target = room.pop(place)
            bins[target].append(item)
            insort(room, (free - weights[item], target))
    return bins


def _deal(bins: list[list[int]], lengths: Sequence[int], dp: int) -> StepPlan:
    """Deal bins to ranks: heaviest `dp` first, so that ranks which wait for each other have like loads."""
    assert len(bins) % dp == 0
    load = [sum(lengths[sample] for sample in members) for members in bins]
    order = sorted(range(len(bins)), key=lambda b: (-load[b], b))
    ranks: list[list[list[int]]] = [[] for _ in range(dp)]
    totals = [0] * dp
    for start in range(0, len(order), dp):
        # the rank that has least so far takes the heaviest of this round
        takers = sorted(range(dp), key=lambda rank: (totals[rank], rank))
        for rank, b in zip(takers, order[start : start + dp], strict=True):
            ranks[rank].append(sorted(bins[b]))
            totals[rank] += load[b]
    return StepPlan(micro_batches=ranks)
