"""PPO: the clipped objective, which GRPO and its kin share, and generalised advantage estimation.

Shapes: T packed tokens. Schulman et al. 2017 (arXiv:1707.06347), clip-higher of DAPO (Yu et al. 2025,
arXiv:2503.14476), dual clip of Ye et al. 2020 (arXiv:1912.09729), GAE of Schulman et al. 2016 (arXiv:1506.02438).
"""

import torch
from torch import Tensor

from rlkit.algo.kl import MAX_LOG_RATIO
from rlkit.algo.scan import next_trained, reverse_scan, step_carry
from rlkit.types.errors import ConfigError


def clipped_objective(
    log_ratio_T: Tensor,
    advantages_T: Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
) -> tuple[Tensor, Tensor]:
    """(token losses, bool: the clip decided this token's loss), both [T]. Inputs are finite.

    max(-ratio * A, -clip(ratio, 1 - eps_clip, 1 + eps_clip_high) * A), and for A < 0 at most `eps_clip_c` * |A|.
    """
    if eps_clip_c is not None and not eps_clip_c > 1.0:
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


def gae(
    rewards_T: Tensor,
    values_T: Tensor,
    *,
    mask_T: Tensor,
    cu_seqlens: Tensor,
    max_len: int,
    gamma: float,
    lambd: float,
) -> tuple[Tensor, Tensor]:
    """(advantages, returns) [T] of trained tokens, 0 elsewhere; steps are trained tokens, and the episode ends with the
    sequence.

    delta_t = r_t + gamma * V_{t+1} - V_t, A_t = delta_t + gamma * lambd * A_{t+1}, return_t = A_t + V_t
    (arXiv:1506.02438, eq. 16). Masked entries may hold anything.
    """
    zero = values_T.new_zeros(())
    values_T = torch.where(mask_T, values_T, zero)
    next_T = next_trained(values_T, mask_T, cu_seqlens, max_len=max_len)
    delta_T = torch.where(mask_T, rewards_T + gamma * next_T - values_T, zero)
    carry_T = step_carry(mask_T, cu_seqlens, gamma * lambd, values_T.dtype)
    advantages_T = torch.where(mask_T, reverse_scan(delta_T, carry_T, max_len=max_len), zero)
    return advantages_T, advantages_T + values_T
