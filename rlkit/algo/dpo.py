"""Direct preference optimisation: a policy learns from pairs of responses which one is better. Called by
`objective.py`.

Shapes: T packed tokens, S packed sequences, P pairs. Pair p is made of the sequences 2p (chosen) and 2p + 1 (rejected);
a packed row may end with a sequence of padding that belongs to no pair.

With h = log pi(y) / ref(y) summed over a response's trained tokens and m = h_chosen - h_rejected:
sigmoid (Rafailov et al. 2023, arXiv:2305.18290, eq. 7): -log sigmoid(beta m); with label smoothing e
(Mitchell 2023, "cDPO"): -(1 - e) log sigmoid(beta m) - e log sigmoid(-beta m).
ipo (Azar et al. 2023, arXiv:2310.12036, eq. 17): (m - 1 / (2 beta))^2.
"""

from typing import Literal, assert_never

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlkit.algo.sequences import Sequences

DpoLossType = Literal["sigmoid", "ipo"]

SUM_NAMES = ("dpo_accuracy", "dpo_margin", "dpo_chosen_reward", "dpo_rejected_reward", "dpo_chosen_logp")
"""What is reported of pairs, as means over the pairs of a step."""


def pair_loss(
    margins_P: Tensor, *, beta: float, loss_type: DpoLossType, label_smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(loss, its derivative with respect to the margin), both [P]. `margins_P`: log-ratio of the chosen response minus
    that of the rejected one.
    """
    match loss_type:
        case "sigmoid":
            scaled_P = beta * margins_P
            kept, flipped = 1.0 - label_smoothing, label_smoothing
            loss_P = -kept * logsigmoid(scaled_P) - flipped * logsigmoid(-scaled_P)
            slope_P = beta * (flipped * torch.sigmoid(scaled_P) - kept * torch.sigmoid(-scaled_P))
        case "ipo":
            distance_P = margins_P - 1.0 / (2.0 * beta)
            loss_P, slope_P = distance_P.square(), 2.0 * distance_P
        case _:
            assert_never(loss_type)
    return loss_P, slope_P


def dpo_loss(
    logp_T: Tensor,
    ref_logp_T: Tensor,
    *,
    mask_T: Tensor,
    weight_T: Tensor,
    is_chosen_S: Tensor,
    sequences: Sequences,
    beta: float,
    loss_type: DpoLossType = "sigmoid",
    label_smoothing: float = 0.0,
    entropy_T: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weighted mean of the pairs' losses: a pair weighs what the tokens of its two responses weigh together.

    `is_chosen_S` (bool): true at 2p of each pair; what follows no such sequence is in no pair. The gradient is made by
    hand, since the sums over sequences carry none: each trained token of the chosen response gets the derivative of its
    pair's loss, each of the rejected one its negative. Sums: loss and `SUM_NAMES` (weighted), entropy.
    """
    zero = logp_T.new_zeros(())
    logp_T = torch.where(mask_T, logp_T, zero)
    weight_T = torch.where(mask_T, weight_T, zero)
    ratio_T = logp_T - torch.where(mask_T, ref_logp_T, zero)
    ratio_S, logp_S, weight_S = sequences.sums(ratio_T, logp_T, weight_T)
    num_pairs = ratio_S.numel() // 2
    is_pair_P = is_chosen_S[: 2 * num_pairs : 2]
    (chosen_P, rejected_P) = ratio_S[: 2 * num_pairs].view(num_pairs, 2).unbind(1)
    weight_P = torch.where(is_pair_P, weight_S[: 2 * num_pairs].view(num_pairs, 2).sum(1), zero)
    margins_P = torch.where(is_pair_P, chosen_P - rejected_P, zero)
    loss_P, slope_P = pair_loss(margins_P, beta=beta, loss_type=loss_type, label_smoothing=label_smoothing)

    value = (loss_P * weight_P).sum()
    slope_S = torch.zeros_like(ratio_S)
    slope_S[: 2 * num_pairs] = torch.stack([slope_P * weight_P, -slope_P * weight_P], dim=1).flatten()
    surrogate = (sequences.spread(slope_S) * logp_T).sum()
    loss = surrogate + (value - surrogate.detach())
    reported = {
        "loss": loss_P,
        "dpo_accuracy": (margins_P > 0).to(logp_T.dtype),
        "dpo_margin": beta * margins_P,
        "dpo_chosen_reward": beta * chosen_P,
        "dpo_rejected_reward": beta * rejected_P,
        "dpo_chosen_logp": logp_S[: 2 * num_pairs : 2],
    }
    sums = {name: (value_P * weight_P).sum() for name, value_P in reported.items()}
    if entropy_T is not None:
        sums["entropy"] = torch.where(mask_T, entropy_T, zero).detach().sum()
    return loss, sums
