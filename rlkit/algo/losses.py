"""Token losses of a packed micro-batch. Called by the backends; knows neither configuration nor ranks.

Shapes: T packed tokens. Every function returns `(loss, sums)`: `loss` is the scalar to differentiate, `sums` are
detached float32 scalars. The names in `WEIGHTED` are sums of `value * weight_T` and add up, over all micro-batches of
all ranks, to the step's value; the others are plain sums over trained tokens, to be divided by the step's number of
trained tokens.

Invariant: `weight_T` holds the global denominator (`types/batches.py`), so nothing is divided by a local count here.
Masked positions may hold anything, NaN included: they are replaced before any arithmetic, because NaN * 0 is NaN.
"""

from typing import Literal

import torch
from torch import Tensor

from rlkit.algo import dpo
from rlkit.algo.cispo import cispo_objective
from rlkit.algo.gspo import sequence_log_ratio
from rlkit.algo.kl import KlType, token_kl, unbiased_kl
from rlkit.algo.ppo import clipped_objective
from rlkit.algo.sequences import Sequences

WEIGHTED = ("loss", "pg_loss", "kl_loss", *dpo.SUM_NAMES)

LossAndSums = tuple[Tensor, dict[str, Tensor]]

PolicyObjective = Literal["clip", "gspo", "cispo"]
"""Token ratios clipped as in PPO and GRPO; sequence ratios clipped; token ratios clipped and held fixed."""


def policy_loss(
    logp_T: Tensor,
    old_logp_T: Tensor,
    advantages_T: Tensor,
    *,
    mask_T: Tensor,
    weight_T: Tensor,
    eps_clip: float,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
    objective: PolicyObjective = "clip",
    sequences: Sequences | None = None,
    importance_T: Tensor | None = None,
    entropy_T: Tensor | None = None,
    entropy_coef: float = 0.0,
    ref_logp_T: Tensor | None = None,
    kl_loss_coef: float = 0.0,
    kl_loss_type: KlType = "low_var_kl",
    use_unbiased_kl: bool = False,
) -> LossAndSums:
    """Policy gradient by `objective` (`ppo.py`, `gspo.py`, `cispo.py`), each token's times `importance_T`, minus
    entropy bonus, plus KL to a reference.

    "gspo" needs `sequences`. `importance_T` is constant and corrects the policy gradient alone. Sums: loss, pg_loss,
    kl_loss (with `ref_logp_T`), ppo_kl (old - new), clip_fraction, entropy (with `entropy_T`). ConfigError for an
    `eps_clip_c` of 1 or less.
    """
    zero = logp_T.new_zeros(())
    logp_T = torch.where(mask_T, logp_T, zero)
    old_logp_T = torch.where(mask_T, old_logp_T, zero)
    advantages_T = torch.where(mask_T, advantages_T, zero)
    weight_T = torch.where(mask_T, weight_T, zero)

    log_ratio_T = logp_T - old_logp_T
    if objective == "cispo":
        token_loss_T, clipped_T = cispo_objective(
            logp_T, log_ratio_T, advantages_T, eps_clip=eps_clip, eps_clip_high=eps_clip_high
        )
    else:
        ratio_of_T = log_ratio_T
        if objective == "gspo":
            assert sequences is not None, "the ratio of a sequence needs to know which tokens it has"
            ratio_of_T = torch.where(mask_T, sequence_log_ratio(log_ratio_T, mask_T, sequences), zero)
        token_loss_T, clipped_T = clipped_objective(
            ratio_of_T, advantages_T, eps_clip=eps_clip, eps_clip_high=eps_clip_high, eps_clip_c=eps_clip_c
        )
    if importance_T is not None:
        token_loss_T = token_loss_T * torch.where(mask_T, importance_T, zero)
    pg_loss = (token_loss_T * weight_T).sum()
    loss = pg_loss
    sums = {
        "pg_loss": pg_loss.detach(),
        "ppo_kl": -log_ratio_T.detach().sum(),
        "clip_fraction": clipped_T.sum(dtype=torch.float32),
    }
    if ref_logp_T is not None:
        kl_T = token_kl(logp_T, torch.where(mask_T, ref_logp_T, zero), kl_type=kl_loss_type)
        if use_unbiased_kl:
            kl_T = unbiased_kl(kl_T, log_ratio_T)
        kl_loss = (kl_T * weight_T).sum()
        loss = loss + kl_loss_coef * kl_loss
        sums["kl_loss"] = kl_loss.detach()
    if entropy_T is not None:
        entropy_T = torch.where(mask_T, entropy_T, zero)
        if entropy_coef != 0.0:
            loss = loss - entropy_coef * (entropy_T * weight_T).sum()
        sums["entropy"] = entropy_T.detach().sum()
    sums["loss"] = loss.detach()
    return loss, sums


def sft_loss(logp_T: Tensor, *, mask_T: Tensor, weight_T: Tensor, entropy_T: Tensor | None = None) -> LossAndSums:
    """Negative log-likelihood of the trained tokens. Sums: loss, entropy (with `entropy_T`)."""
    zero = logp_T.new_zeros(())
    loss = -(torch.where(mask_T, logp_T, zero) * torch.where(mask_T, weight_T, zero)).sum()
    sums = {"loss": loss.detach()}
    if entropy_T is not None:
        sums["entropy"] = torch.where(mask_T, entropy_T, zero).detach().sum()
    return loss, sums


def log_prob_gap(trainer_logp_T: Tensor, rollout_logp_T: Tensor, mask_T: Tensor) -> tuple[Tensor, Tensor]:
    """(sum, maximum) over trained tokens of |trainer - engine| log-prob: what the two disagree on under the same
    weights.
    """
    gap_T = torch.where(mask_T, (trainer_logp_T.detach() - rollout_logp_T).abs(), 0.0)
    return gap_T.sum(), gap_T.max() if gap_T.numel() else gap_T.new_zeros(())


def mismatch_kl(trainer_logp_T: Tensor, rollout_logp_T: Tensor, mask_T: Tensor) -> tuple[Tensor, Tensor]:
    """(k1, k3) summed over trained tokens: two estimates of KL(engine, trainer) by what the engine sampled."""
    zero = trainer_logp_T.new_zeros(())
    trainer_T = torch.where(mask_T, trainer_logp_T.detach(), zero)
    rollout_T = torch.where(mask_T, rollout_logp_T, zero)
    k1_T, k3_T = (token_kl(rollout_T, trainer_T, kl_type=kl_type) for kl_type in ("k1", "k3"))
    return k1_T.sum(), k3_T.sum()
