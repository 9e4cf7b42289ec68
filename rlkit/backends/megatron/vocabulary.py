"""Log-probs and entropies where each tensor-parallel rank holds some rows of the head. Called by `model.py`.

The same as `algo/logprobs.py`, with three sums and a maximum over ranks for each chunk. Logits never exist for more
than a chunk of rows, and never for more than this rank's part of the vocabulary.

Shapes: N scored tokens, D hidden size, V rows of this rank's part of the head, C rows of a chunk.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def parallel_log_probs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    *,
    first_row: int,
    group: ProcessGroup,
    temperature: float,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """(log-prob of each target, entropy of each distribution), float32 [N], the same on every rank of `group`.

    `weight_VD`: rows [first_row, first_row + V) of the head. Collective over `group`, forward and backward. The
    gradient of `hidden_ND` is this rank's part of a sum over the group: whoever made `hidden_ND` whole adds them up.
    """
    assert temperature > 0.0 and chunk_size > 0
    logp_N, entropy_N = _ParallelLogProbs.apply(
        hidden_ND, weight_VD, targets_N, first_row, group, temperature, chunk_size
    )
    return logp_N, entropy_N


class _ParallelLogProbs(torch.autograd.Function):
    """With p = softmax(z / T): d logp_t / dz = (onehot_t - p) / T and dH / dz_j = -p_j (log p_j + H) / T; every rank
    has its own columns of both.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        first_row: int,
        group: ProcessGroup,
        temperature: float,
        chunk_size: int,
    ) -> tuple[Tensor, Tensor]:
        num = hidden_ND.shape[0]
        logp_N = hidden_ND.new_empty(num, dtype=torch.float32)
        entropy_N, lse_N = torch.empty_like(logp_N), torch.empty_like(logp_N)
        for rows in _chunks(num, chunk_size):
            scaled_CV = (hidden_ND[rows] @ weight_VD.T).float().div_(temperature)
            top_C = _highest(scaled_CV)
            dist.all_reduce(top_C, op=dist.ReduceOp.MAX, group=group)
            shifted_CV = scaled_CV.sub_(top_C[:, None])
            column_C, is_mine_C = _columns(targets_N[rows], first_row, weight_VD.shape[0])
            target_C = torch.where(is_mine_C, _pick(shifted_CV, column_C), 0.0)
            weights_CV = shifted_CV.exp()
            total_C = weights_CV.sum(dim=1)
            sums = torch.stack([total_C, weights_CV.mul_(shifted_CV).sum(dim=1), target_C])
            dist.all_reduce(sums, group=group)
            total_C, weighted_C, target_C = sums
            log_total_C = total_C.log()
            logp_N[rows] = target_C - log_total_C
            entropy_N[rows] = log_total_C - weighted_C / total_C
            lse_N[rows] = log_total_C + top_C
        ctx.save_for_backward(hidden_ND, weight_VD, targets_N, entropy_N, lse_N)
        ctx.first_row, ctx.temperature, ctx.chunk_size = first_row, temperature, chunk_size
        ctx.set_materialize_grads(False)
        return logp_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads_N: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, targets_N, entropy_N, lse_N = ctx.saved_tensors
        grad_logp_N, grad_entropy_N = grads_N
        if grad_logp_N is None:
            grad_logp_N = torch.zeros_like(entropy_N)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden_ND = torch.zeros_like(hidden_ND) if needs_hidden else None
        # float32 over chunks: adding chunk after chunk in bf16 would lose what the matrix product had kept
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if needs_weight else None
        for rows in _chunks(hidden_ND.shape[0], ctx.chunk_size):
            scaled_CV = (hidden_ND[rows] @ weight_VD.T).float().div_(ctx.temperature)
            logp_CV = scaled_CV.sub_(lse_N[rows, None])
            grad_CV = logp_CV.exp()
            pull_C1 = grad_logp_N[rows, None]
            if grad_entropy_N is None:
                grad_CV.mul_(-pull_C1)
            else:
                entropy_pull_CV = logp_CV.add_(entropy_N[rows, None]).mul_(-grad_entropy_N[rows, None])
                grad_CV.mul_(entropy_pull_CV.sub_(pull_C1))
            column_C, is_mine_C = _columns(targets_N[rows], ctx.first_row, weight_VD.shape[0])
            if weight_VD.shape[0] > 0:
                grad_CV.scatter_add_(1, column_C[:, None], torch.where(is_mine_C, grad_logp_N[rows], 0.0)[:, None])
            grad_CV = grad_CV.div_(ctx.temperature).to(weight_VD.dtype)
            if grad_hidden_ND is not None:
                torch.mm(grad_CV, weight_VD, out=grad_hidden_ND[rows])
            if grad_weight_VD is not None:
                grad_weight_VD.add_(grad_CV.T @ hidden_ND[rows])
        weight_grad = None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype)
        return grad_hidden_ND, weight_grad, None, None, None, None, None


def _highest(scaled_CV: Tensor) -> Tensor:
    """[C]; a rank without any row of the vocabulary has none."""
    if scaled_CV.shape[1] == 0:
        return scaled_CV.new_full((scaled_CV.shape[0],), float("-inf"))
    return scaled_CV.amax(dim=1)


def _columns(targets_C: Tensor, first_row: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """(column of each target, 0 where another rank has it; whether this rank has it)."""
    column_C = targets_C - first_row
    is_mine_C = (column_C >= 0) & (column_C < num_rows)
    return torch.where(is_mine_C, column_C, 0), is_mine_C


def _pick(values_CV: Tensor, column_C: Tensor) -> Tensor:
    if values_CV.shape[1] == 0:
        return values_CV.new_zeros(values_CV.shape[0])
    return values_CV.gather(1, column_C[:, None]).squeeze(1)


def _chunks(num_rows: int, size: int) -> list[slice]:
    count = -(-num_rows // size)
    return [slice(num_rows * n // count, num_rows * (n + 1) // count) for n in range(count)]
