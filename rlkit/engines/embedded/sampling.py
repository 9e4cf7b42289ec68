"""Next tokens for a whole batch at once, each row by its own parameters and its own random number.

The random number of a token depends on (seed, position) alone: the same request gives the same tokens alone, in any
batch, and when it is continued after an abort. The token is where that number falls in the cumulative distribution,
which needs one number a row, not one a vocabulary entry.

Log-probs are log-softmax(logits / T) over the whole vocabulary in float32, whatever top-k, top-p and min-p leave to
sample from; greedy rows (temperature 0) count as T = 1. Both as in SGLang.

Shapes: B rows, V vocabulary, R rows that are filtered.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlkit.types.generation import SamplingParams

BLOCK = 256
"""Vocabulary entries that are summed before the search; the search then looks into one block only."""
TOPK_LIMIT = 1024
"""Up to this largest top-k, `torch.topk` replaces a sort of the whole vocabulary."""
GREEDY_BELOW = 1e-6
"""Temperatures below this are greedy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingBatch:
    """Parameters of B rows as tensors on the logits' device."""

    temperature_B1: Tensor | None
    """None when every row has temperature 1 (or is greedy)."""
    greedy_B: Tensor | None
    """bool; None when no row is greedy."""
    filtered_R: Tensor | None
    """int64 row numbers that top-k, top-p or min-p restrict; None when there are none."""
    top_k_R1: Tensor
    top_p_R1: Tensor
    min_p_R1: Tensor
    max_top_k: int
    """Largest top-k of the filtered rows; the vocabulary size where one has none."""

    @classmethod
    def build(cls, rows: Sequence[SamplingParams], *, vocab_size: int, device: torch.device) -> "SamplingBatch":
        greedy = [row.temperature < GREEDY_BELOW for row in rows]
        temperature = [1.0 if is_greedy else row.temperature for row, is_greedy in zip(rows, greedy, strict=True)]
        filtered = [
            index
            for index, row in enumerate(rows)
            if not greedy[index] and (row.top_p < 1 or row.min_p > 0 or 0 < row.top_k < vocab_size)
        ]
        top_k = [rows[i].top_k if 0 < rows[i].top_k < vocab_size else vocab_size for i in filtered]

        def column(values: list[Any], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)[:, None]

        return cls(
            temperature_B1=column(temperature, torch.float32) if any(t != 1.0 for t in temperature) else None,
            greedy_B=torch.tensor(greedy, device=device) if any(greedy) else None,
            filtered_R=torch.tensor(filtered, device=device) if filtered else None,
            top_k_R1=column(top_k, torch.int64),
            top_p_R1=column([rows[i].top_p for i in filtered], torch.float32),
            min_p_R1=column([rows[i].min_p for i in filtered], torch.float32),
            max_top_k=max(top_k, default=vocab_size),
        )


def sample(logits_BV: Tensor, batch: SamplingBatch, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """Token ids (int64 [B]) and their log-probs (float32 [B]). `uniform_B` (float64, in [0, 1)) decides."""
    scaled_BV = logits_BV.float()
    if batch.temperature_B1 is not None:
        scaled_BV = scaled_BV / batch.temperature_B1
    logprobs_BV = scaled_BV.log_softmax(-1)
    probs_BV = logprobs_BV.exp()
    tokens_B = inverse_cdf(probs_BV, uniform_B)
    if batch.filtered_R is not None:
        rows = batch.filtered_R
        tokens_B[rows] = _sample_filtered(probs_BV[rows], batch, uniform_B[rows])
    if batch.greedy_B is not None:
        tokens_B = torch.where(batch.greedy_B, scaled_BV.argmax(-1), tokens_B)
    return tokens_B, logprobs_BV.gather(1, tokens_B[:, None])[:, 0]


def _sample_filtered(probs_RV: Tensor, batch: SamplingBatch, uniform_R: Tensor) -> Tensor:
    """Rows restricted jointly by top-k, top-p and min-p: all three look at the unrestricted probabilities."""
    if batch.max_top_k <= TOPK_LIMIT:
        ordered, ids = probs_RV.topk(batch.max_top_k, dim=-1)
    else:
        ordered, ids = probs_RV.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    keep = torch.arange(ordered.shape[1], device=ordered.device) < batch.top_k_R1
    keep &= before <= batch.top_p_R1
    keep &= ordered >= ordered[:, :1] * batch.min_p_R1
    kept = torch.where(keep, ordered, 0.0)
    return ids.gather(1, inverse_cdf(kept, uniform_R)[:, None])[:, 0]


def inverse_cdf(weights_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """The entry of each row in whose share of the total `uniform` falls; never one of weight 0. int64 [B].

    Sums run in float64, so a share below float32's resolution near 1 is still reached. A row with NaN gives
    some valid index.
    """
    num_rows, size = weights_BV.shape
    if size % BLOCK:
        weights_BV = torch.nn.functional.pad(weights_BV, (0, BLOCK - size % BLOCK))
    blocks = weights_BV.view(num_rows, -1, BLOCK)
    sums = blocks.sum(-1)
    block, rest = _search(sums.double(), uniform_B)
    inner, _ = _search(blocks[torch.arange(num_rows, device=block.device), block].double(), rest)
    return (block * BLOCK + inner).clamp_(max=size - 1)


def _search(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Entry that `uniform` falls into, and where inside it: again in [0, 1)."""
    ends = weights.cumsum(-1)
    total = ends[:, -1]
    # The product may round up to the total, beyond which there is nothing to find.
    target = torch.minimum(uniform * total, total.nextafter(torch.zeros_like(total)))
    index = torch.searchsorted(ends, target[:, None], right=True).clamp_(max=weights.shape[1] - 1)
    width = weights.gather(1, index)
    rest = (target[:, None] - (ends.gather(1, index) - width)) / width
    return index[:, 0], rest[:, 0].clamp(0.0, 1.0 - 2.0**-53)


def uniform_numbers(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position), by two rounds of SplitMix64 (Steele et al., 2014)."""
    mixed = _splitmix64(np.array([seed & (2**64 - 1) for seed in seeds], dtype=np.uint64))
    mixed = _splitmix64(mixed ^ np.asarray(positions, dtype=np.uint64))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _splitmix64(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        z = state + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))
