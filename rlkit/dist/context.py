"""Differentiable collectives of a context-parallel group: its ranks hold different tokens of the same row.

Every rank of the group computes the same loss from the same gathered log-probs. So the gradient that arrives at a
gathered log-prob is whole on every rank and is only cut back to the rank's own tokens, while the gradients that arrive
at gathered keys and values are partial sums, one a rank, and are added up.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def gather_tokens(part: Tensor, order_T: Tensor, group: ProcessGroup) -> Tensor:
    """[c, ...] on each of the group's ranks -> [T, ...] in the order of the row. Collective over `group`, and so is the
    backward pass, which adds the ranks' gradients.

    `order_T` (int64): where token t of the row lies when the ranks' parts are laid end to end.
    """
    gathered: Tensor = _GatherTokens.apply(part, order_T, group)
    return gathered


def merge_scores(scores_T: Tensor, group: ProcessGroup) -> Tensor:
    """Sum [T] over the group, where each entry is non-zero on one rank only. Collective over `group` in the forward pass
    alone: each rank takes its own entries' gradient.
    """
    merged: Tensor = _MergeScores.apply(scores_T, group)
    return merged


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, order_T: Tensor, group: ProcessGroup) -> Tensor:
        parts = part.new_empty((part.shape[0] * group.size(), *part.shape[1:]))
        _all_gather(parts, part.contiguous(), group)
        ctx.save_for_backward(order_T)
        ctx.group = group
        return parts.index_select(0, order_T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (order_T,) = ctx.saved_tensors
        group: ProcessGroup = ctx.group
        grad_parts = torch.empty_like(grads[0])
        grad_parts.index_copy_(0, order_T, grads[0].contiguous())
        if grad_parts.device.type == "cpu":  # gloo has no reduce-scatter
            dist.all_reduce(grad_parts, group=group)
            own = grad_parts.chunk(group.size())[group.rank()].clone()
        else:
            own = grad_parts.new_empty((grad_parts.shape[0] // group.size(), *grad_parts.shape[1:]))
            _reduce_scatter(own, grad_parts, group)
        return own, None, None


class _MergeScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores_T: Tensor, group: ProcessGroup) -> Tensor:
        merged = scores_T.clone()
        dist.all_reduce(merged, group=group)
        return merged

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


def _all_gather(output: Tensor, part: Tensor, group: ProcessGroup) -> None:
    # torch 2.13 gave both functions new names and warns about the old ones, which are all that 2.11 has
    gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
    gather(output, part, group=group)


def _reduce_scatter(output: Tensor, parts: Tensor, group: ProcessGroup) -> None:
    reduce = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
    reduce(output, parts, group=group)
