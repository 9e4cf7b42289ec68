"""Weights that correct for the gap between the policy that sampled and the policy that is trained: TIS, MIS, IcePop.

The engine samples with its own kernels and precision (mu); the trainer scores with other ones (pi_old, the same
weights). Shapes: S packed sequences, T packed tokens. Called by `objective.py`.

TIS: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", truncation at the level
of tokens. MIS: Liu et al. 2025, "When Speed Kills Stability", levels, rejection and veto. IcePop: Ling team 2025,
"Small Leak Can Sink a Great Ship", weights outside a band become 0: mode `mask`.
"""

from dataclasses import dataclass
from typing import Literal, assert_never

import torch
from torch import Tensor

from rlkit.algo.kl import MAX_LOG_RATIO
from rlkit.algo.sequences import Sequences

ImportanceLevel = Literal["token", "sequence", "geometric"]
"""Of what the ratio is: each token; the product over the sequence's trained tokens; its geometric mean."""

ImportanceMode = Literal["truncate", "clip", "mask"]
"""Weights above the band become its upper end; those below it the lower end as well; those outside become 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Weighting:
    """How a token's loss is weighed."""

    level: ImportanceLevel
    mode: ImportanceMode
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejection:
    """Which tokens are left out of the loss: ratio outside of the band, or one in its sequence below `veto_below`."""

    level: ImportanceLevel
    low: float
    high: float
    veto_below: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportanceWeights:
    """Constants of the step: no gradient. 0 and False at masked tokens."""

    weight_T: Tensor  # f32 [T]; 0 where rejected
    keep_T: Tensor  # bool [T]; trained and not rejected: what denominators count
    is_changed_T: Tensor  # bool [T]; the weight was truncated or clipped


def importance_weights(
    old_logp_T: Tensor,
    rollout_logp_T: Tensor,
    mask_T: Tensor,
    sequences: Sequences,
    *,
    weighting: Weighting | None,
    rejection: Rejection | None,
) -> ImportanceWeights:
    """Weights pi_old / mu of trained tokens. Without `weighting` they are 1, without `rejection` all are kept.

    `old_logp_T` is the trainer's log-prob before the rollout's first step, never the current one. Masked entries may
    hold anything.
    """
    zero = old_logp_T.new_zeros(())
    log_ratio_T = torch.where(mask_T, old_logp_T.detach() - rollout_logp_T, zero)
    weight_T, keep_T = torch.ones_like(log_ratio_T), mask_T
    is_changed_T = torch.zeros_like(mask_T)
    if weighting is not None:
        ratio_T = importance_ratio(log_ratio_T, mask_T, sequences, weighting.level)
        weight_T = ratio_T
        match weighting.mode:
            case "truncate":
                weight_T = ratio_T.clamp(max=weighting.high)
            case "clip":
                weight_T = ratio_T.clamp(weighting.low, weighting.high)
            case "mask":
                keep_T = keep_T & (ratio_T >= weighting.low) & (ratio_T <= weighting.high)
            case _:
                assert_never(weighting.mode)
        is_changed_T = mask_T & (weight_T != ratio_T)
    if rejection is not None:
        ratio_T = importance_ratio(log_ratio_T, mask_T, sequences, rejection.level)
        keep_T = keep_T & (ratio_T >= rejection.low) & (ratio_T <= rejection.high)
        if rejection.veto_below is not None:
            is_bad_T = mask_T & (importance_ratio(log_ratio_T, mask_T, sequences, "token") < rejection.veto_below)
            (num_bad_S,) = sequences.sums(is_bad_T.to(log_ratio_T.dtype))
            keep_T = keep_T & (sequences.spread(num_bad_S) == 0)
    return ImportanceWeights(weight_T=torch.where(keep_T, weight_T, zero), keep_T=keep_T, is_changed_T=is_changed_T)


def importance_ratio(log_ratio_T: Tensor, mask_T: Tensor, sequences: Sequences, level: ImportanceLevel) -> Tensor:
    """[T]: exp of the log-ratio of each token, or of its sequence. Bounded to e^20 before exp."""
    match level:
        case "token":
            level_T = log_ratio_T
        case "sequence":
            kept_T = torch.where(mask_T, log_ratio_T, log_ratio_T.new_zeros(()))
            level_T = sequences.spread(sequences.sums(kept_T)[0])
        case "geometric":
            level_T = sequences.spread(sequences.means(log_ratio_T, mask_T))
        case _:
            assert_never(level)
    return level_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def effective_sample_share(mean_weight: float, mean_squared_weight: float) -> float:
    """Effective sample size over the number of samples, (sum w)^2 / (n * sum w^2): 1 for equal weights. 0 if all are 0
    (Kong 1992).
    """
    return mean_weight**2 / mean_squared_weight if mean_squared_weight > 0.0 else 0.0
