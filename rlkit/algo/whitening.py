"""Advantages of mean 0 and variance 1 over all trained tokens of a rollout. Called by `objective.py`.

Shapes: T packed tokens of one micro-batch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rlkit.algo.sequences import SumShares, unshared


def whiten(
    values: Sequence[Tensor], masks: Sequence[Tensor], *, sum_shares: SumShares = unshared, eps: float = 1e-8
) -> list[Tensor]:
    """(x - mean) / sqrt(variance + eps), variance with n - 1, over the tokens that the masks keep; 0 at the others.

    `values` and `masks` are this rank's micro-batches, [T] each; `sum_shares` adds over the ranks that hold other
    tokens. Sums are float64, and the variance is of centred values, so large means cost no digits. Collective.
    """
    kept = [torch.where(mask_T, value_T.double(), 0.0) for value_T, mask_T in zip(values, masks, strict=True)]
    counts = torch.stack([mask_T.sum(dtype=torch.float64) for mask_T in masks])
    count, total = sum_shares(torch.stack([counts.sum(), torch.stack([value_T.sum() for value_T in kept]).sum()]))
    mean = total / count.clamp(min=1.0)
    centred = [torch.where(mask_T, value_T - mean, 0.0) for value_T, mask_T in zip(kept, masks, strict=True)]
    squares = torch.stack([value_T.square().sum() for value_T in centred]).sum()
    variance = sum_shares(squares[None])[0] / (count - 1.0).clamp(min=1.0)
    scale = (variance + eps).rsqrt()
    return [(centred_T * scale).to(value_T.dtype) for centred_T, value_T in zip(centred, values, strict=True)]
