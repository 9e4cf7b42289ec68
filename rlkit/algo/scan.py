"""Sums that run backwards through each packed sequence: returns, advantages, what comes next. Called by `reinforce.py`
and `ppo.py`.

Shapes: T packed tokens. Only trained tokens count as steps; others (tool output, prompts) are stepped over.
Sequences must lie on the rank as a whole.
"""

import torch
from torch import Tensor


def reverse_scan(values_T: Tensor, carry_T: Tensor, *, max_len: int) -> Tensor:
    """y_t = values_t + carry_t * y_{t+1}, for all t at once, where y behind the last token is 0.

    A carry of 0 ends a sequence. `max_len`: no run of tokens with other carries is longer. By doubling: after round k,
    y_t covers 2^k tokens and the carry is the product over them; log2(max_len) rounds instead of max_len.
    """
    total_T, carry_T = values_T.clone(), carry_T.clone()
    reach = 1
    while reach < max_len and reach < values_T.numel():
        total_T[:-reach] = total_T[:-reach] + carry_T[:-reach] * total_T[reach:]
        carry_T[:-reach] = carry_T[:-reach] * carry_T[reach:]
        carry_T[-reach:] = 0.0
        reach *= 2
    return total_T


def step_carry(mask_T: Tensor, cu_seqlens: Tensor, discount: float, dtype: torch.dtype) -> Tensor:
    """Carry [T] of a recurrence over trained tokens: `discount` at each, 1 at the tokens between, 0 at each end."""
    carry_T = torch.ones(mask_T.shape, dtype=dtype, device=mask_T.device).masked_fill_(mask_T, discount)
    carry_T[cu_seqlens[1:].long() - 1] = 0.0
    return carry_T


def next_trained(values_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor, *, max_len: int) -> Tensor:
    """[T]: the value of the next trained token of the same sequence, 0 behind the last."""
    zero = values_T.new_zeros(())
    carry_T = torch.where(mask_T, zero, step_carry(mask_T, cu_seqlens, 1.0, values_T.dtype))
    from_here_T = reverse_scan(torch.where(mask_T, values_T, zero), carry_T, max_len=max_len)
    is_end_T = step_carry(mask_T, cu_seqlens, 1.0, values_T.dtype) == 0.0
    return torch.where(is_end_T, zero, from_here_T.roll(-1))


def is_last_trained(mask_T: Tensor, cu_seqlens: Tensor, *, max_len: int) -> Tensor:
    """bool [T]: the last trained token of each sequence that has one."""
    follows_T = next_trained(mask_T.to(torch.float32), mask_T, cu_seqlens, max_len=max_len)
    return mask_T & (follows_T == 0.0)
