"""What a critic learns: values of trained tokens against the returns that generalised advantage estimation gave them.
The backends train a critic by `ValueObjective` as they train a policy by `objective.Objective`.

Shapes: T packed tokens. A value is aligned with its token: V_t is the worth of the state in which token t was sampled,
so it comes from the hidden state of token t-1.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rlkit.algo.losses import LossAndSums
from rlkit.algo.objective import LossReport
from rlkit.algo.sequences import SumShares, unshared
from rlkit.config.schema import RunConfig
from rlkit.types.batches import PackedBatch
from rlkit.types.ranks import MetricSet


def value_loss(
    values_T: Tensor,
    old_values_T: Tensor,
    returns_T: Tensor,
    *,
    mask_T: Tensor,
    weight_T: Tensor,
    value_clip: float,
) -> LossAndSums:
    """0.5 * max((V - R)^2, (clip(V, old - c, old + c) - R)^2), weighted: the clipped loss of PPO's implementations
    (Schulman et al. 2017, openai/baselines; Andrychowicz et al. 2020, arXiv:2006.05990, appendix B.2).

    Sums: loss (weighted), clip_fraction (tokens whose loss the clip decided, so that they have no gradient). Masked
    entries may hold anything.
    """
    zero = values_T.new_zeros(())
    values_T, old_values_T, returns_T, weight_T = (
        torch.where(mask_T, x, zero) for x in (values_T, old_values_T, returns_T, weight_T)
    )
    clipped_T = torch.clamp(values_T, old_values_T - value_clip, old_values_T + value_clip)
    plain_loss_T = (values_T - returns_T).square()
    clipped_loss_T = (clipped_T - returns_T).square()
    loss = 0.5 * (torch.maximum(plain_loss_T, clipped_loss_T) * weight_T).sum()
    is_clipped_T = clipped_loss_T > plain_loss_T
    return loss, {"loss": loss.detach(), "clip_fraction": is_clipped_T.sum(dtype=torch.float32)}


def value_fit(
    values: Sequence[Tensor],
    returns: Sequence[Tensor],
    masks: Sequence[Tensor],
    *,
    sum_shares: SumShares = unshared,
) -> Tensor:
    """float64 [3]: mean value, mean return, and explained variance 1 - Var(R - V) / Var(R), over the tokens that the
    masks keep; 0 where all returns are equal.

    The arguments are this rank's micro-batches, [T] each; `sum_shares` adds over the ranks that hold other tokens.
    Variances are of centred values, so large means cost no digits. Collective.
    """

    def total(items: list[Tensor]) -> Tensor:
        return torch.stack([item.sum(dtype=torch.float64) for item in items]).sum()

    def kept(items: Sequence[Tensor]) -> list[Tensor]:
        return [torch.where(mask_T, item_T.double(), 0.0) for item_T, mask_T in zip(items, masks, strict=True)]

    def squares(items: list[Tensor], mean: Tensor) -> Tensor:
        return total([torch.where(mask_T, x_T - mean, 0.0).square() for x_T, mask_T in zip(items, masks, strict=True)])

    values, returns = kept(values), kept(returns)
    errors = [return_T - value_T for return_T, value_T in zip(returns, values, strict=True)]
    counts = total([mask_T.double() for mask_T in masks])
    count, value_sum, return_sum = sum_shares(torch.stack([counts, total(values), total(returns)]))
    count = count.clamp(min=1.0)
    mean_value, mean_return = value_sum / count, return_sum / count
    error_square, return_square = sum_shares(
        torch.stack([squares(errors, mean_return - mean_value), squares(returns, mean_return)])
    )
    explained = torch.where(return_square > 0.0, 1.0 - error_square / return_square, 0.0)
    return torch.stack([mean_value, mean_return, explained])


class ValueObjective:
    """A critic's `objective.StepObjective`. Batches hold old values and returns (`Objective.finish`)."""

    sum_names = ("loss", "clip_fraction")
    max_names = ()

    def __init__(self, cfg: RunConfig) -> None:
        self._cfg = cfg

    def loss(self, batch: PackedBatch, *outputs: Tensor) -> LossReport:
        """Of a micro-batch and its current values [T]."""
        (values_T,) = outputs
        assert batch.values_T is not None and batch.returns_T is not None
        loss, sums = value_loss(
            values_T,
            batch.values_T,
            batch.returns_T,
            mask_T=batch.loss_mask_T,
            weight_T=batch.loss_weight_T,
            value_clip=self._cfg.critic.value_clip,
        )
        return LossReport(loss=loss, sums=sums, maxima={})

    def derive(self, metrics: MetricSet) -> MetricSet:
        return metrics
