"""Token losses of a packed micro-batch. Called by the backends; knows neither configuration nor ranks.

Shapes: T packed tokens. Every function returns `(loss, sums)`: `loss` is the scalar to differentiate, `sums` are
detached float32 scalars. The names in `WEIGHTED` are sums of `value * weight_T` and add up, over all micro-batches of
all ranks, to the step's value; the others are plain sums over trained tokens, to be divided by the step's number of
trained tokens.

Invariant: `weight_T` holds the global denominator (`types/batches.py`), so nothing is divided by a local count here.
Masked positions may hold anything, NaN included: they are replaced before any arithmetic, because NaN * 0 is NaN.
"""

import torch
from torch import Tensor

from rlkit.algo.kl import MAX_LOG_RATIO, KlType, token_kl
from rlkit.types.errors import ConfigError

WEIGHTED = ("loss", "pg_loss", "kl_loss")

LossAndSums = tuple[Tensor, dict[str, Tensor]]


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
    entropy_T: Tensor | None = None,
    entropy_coef: float = 0.0,
    ref_logp_T: Tensor | None = None,
    kl_loss_coef: float = 0.0,
    kl_loss_type: KlType = "low_var_kl",
) -> LossAndSums:
    """Clipped policy gradient, minus entropy bonus, plus KL to a reference.

    Per token, with ratio = exp(logp - old): max(-ratio * A, -clip(ratio, 1 - eps_clip, 1 + eps_clip_high) * A) (PPO,
    Schulman et al. 2017, arXiv:1707.06347; a higher upper bound is DAPO's clip-higher, arXiv:2503.14476), for A < 0 at
    most `eps_clip_c` * |A| (dual clip, Ye et al. 2020, arXiv:1912.09729). `eps_clip_c` must exceed 1, else ConfigError.
    Sums: loss, pg_loss, kl_loss (with `ref_logp_T`), ppo_kl (old - new), clip_fraction, entropy (with `entropy_T`).
    """
    zero = logp_T.new_zeros(())
    logp_T = torch.where(mask_T, logp_T, zero)
    old_logp_T = torch.where(mask_T, old_logp_T, zero)
    advantages_T = torch.where(mask_T, advantages_T, zero)
    weight_T = torch.where(mask_T, weight_T, zero)

    log_ratio_T = logp_T - old_logp_T
    token_loss_T, clipped_T = clipped_objective(
        log_ratio_T, advantages_T, eps_clip=eps_clip, eps_clip_high=eps_clip_high, eps_clip_c=eps_clip_c
    )
    pg_loss = (token_loss_T * weight_T).sum()
    loss = pg_loss
    sums = {
        "pg_loss": pg_loss.detach(),
        "ppo_kl": -log_ratio_T.detach().sum(),
        "clip_fraction": clipped_T.sum(dtype=torch.float32),
    }
    if ref_logp_T is not None:
        kl_T = token_kl(logp_T, torch.where(mask_T, ref_logp_T, zero), kl_type=kl_loss_type)
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


def clipped_objective(
    log_ratio_T: Tensor,
    advantages_T: Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
) -> tuple[Tensor, Tensor]:
    """(token losses, bool: the clip decided this token's loss), both [T]. Inputs are finite."""
    if eps_clip_c is not None and eps_clip_c <= 1.0:
        raise ConfigError(f"--eps-clip-c {eps_clip_c} must be above 1: it bounds the loss at c * |advantage|; try 3.0")
    eps_high = eps_clip if eps_clip_high is None else eps_clip_high
    # bounded before exp: an infinite ratio turns into NaN in the gradient even where the clip takes the other branch
    ratio_T = log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    plain_T = -ratio_T * advantages_T
    clipped_T = -ratio_T.clamp(1.0 - eps_clip, 1.0 + eps_high) * advantages_T
    loss_T = torch.maximum(plain_T, clipped_T)
    is_clipped_T = clipped_T > plain_T
    if eps_clip_c is not None:
        bound_T = -eps_clip_c * advantages_T
        is_bounded_T = (advantages_T < 0) & (loss_T > bound_T)
        loss_T = torch.where(is_bounded_T, bound_T, loss_T)
        is_clipped_T = is_clipped_T | is_bounded_T
    return loss_T, is_clipped_T


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
