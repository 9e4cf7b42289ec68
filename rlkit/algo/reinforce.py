"""Returns with a penalty for every token: REINFORCE++, and KL as reward for any estimator. Called by `objective.py`.

Shapes: T packed tokens. Hu et al. 2025 (arXiv:2501.03262): A_t = r - beta * sum over s >= t of KL_s, then whitened over
the whole batch. The same formula serves the group estimators, whose r is the sample's advantage in its group.
"""

import torch
from torch import Tensor

from rlkit.algo.scan import is_last_trained, reverse_scan, step_carry


def token_rewards(
    scores_T: Tensor, penalties_T: Tensor | None, *, mask_T: Tensor, cu_seqlens: Tensor, max_len: int
) -> Tensor:
    """[T]: minus the penalty of each trained token, plus the sequence's score at its last one. 0 at other tokens.

    `scores_T` holds each sequence's score at all of its tokens. Masked entries may hold anything.
    """
    zero = scores_T.new_zeros(())
    is_last_T = is_last_trained(mask_T, cu_seqlens, max_len=max_len)
    rewards_T = torch.where(is_last_T, scores_T, zero)
    if penalties_T is not None:
        rewards_T = rewards_T - torch.where(mask_T, penalties_T, zero)
    return rewards_T


def returns_to_go(
    scores_T: Tensor,
    penalties_T: Tensor | None,
    *,
    mask_T: Tensor,
    cu_seqlens: Tensor,
    max_len: int,
    gamma: float = 1.0,
) -> Tensor:
    """[T]: discounted sum, from each trained token to the end of its sequence, of `token_rewards`. 0 at other tokens.

    Steps are trained tokens.
    """
    rewards_T = token_rewards(scores_T, penalties_T, mask_T=mask_T, cu_seqlens=cu_seqlens, max_len=max_len)
    carry_T = step_carry(mask_T, cu_seqlens, gamma, scores_T.dtype)
    return torch.where(mask_T, reverse_scan(rewards_T, carry_T, max_len=max_len), 0.0)
