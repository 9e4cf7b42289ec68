"""How the losses of tokens become the loss of an optimizer step: the weight of one token. Called by `batching.py`, and
by `objective.py` when tokens are rejected after packing.

Shapes: S samples, R rollouts of one optimizer step over all ranks.
"""

import torch
from torch import Tensor


def token_weights(
    rollouts_S: Tensor, tokens_R: Tensor, *, per_token_loss: bool, constant_length: int | None = None
) -> Tensor:
    """[S], float64: weight of each trained token of a sample. `tokens_R`: trained tokens of each rollout over all
    ranks; rollouts without any count nowhere.

    `per_token_loss`: the mean over all tokens of the step. Otherwise the mean over rollouts of each one's token mean;
    or, with `constant_length`, of its token sum over that constant, so that long answers are not favoured (Dr.GRPO,
    arXiv:2503.20783). The samples that a rollout fans out into share its weight.
    """
    tokens_R = tokens_R.double()
    if per_token_loss:
        return (1.0 / tokens_R.sum().clamp(min=1.0)).expand(rollouts_S.shape)
    num_rollouts = (tokens_R > 0).sum().clamp(min=1)
    divisor_R = tokens_R.clamp(min=1.0) if constant_length is None else torch.full_like(tokens_R, constant_length)
    return 1.0 / (num_rollouts * divisor_R[rollouts_S])
