"""Log-probs and entropies of tokens from hidden states, a chunk of rows at a time. Called by the backends.

Shapes: N scored tokens, D hidden size, V vocabulary, T packed tokens, C rows of a chunk.

A log-prob is log_softmax(logits / temperature) over the whole vocabulary in float32. The [N, V] logits never exist at
once: a chunk's logits are made, reduced to N-sized results and dropped, and made again in the backward pass. At 49 k
tokens of vocabulary, 16 k tokens of logits would be 3.2 GB, three times over.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def scored_positions(loss_mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Positions [N] of the tokens to score, in order; each is predicted from the hidden state one position before it.

    A sequence's first token has no predecessor inside its sequence: a mask that holds one is a bug of the caller
    (assertion). Call it with CPU tensors: it waits for the result.
    """
    assert not loss_mask_T[cu_seqlens[:-1].long()].any(), "the first token of a sequence cannot be scored"
    return loss_mask_T.nonzero().squeeze(1)


def chunked_log_probs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    *,
    temperature: float,
    chunk_size: int,
    bias_V: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(log-prob of each target, entropy of each distribution), both float32 [N], differentiable with respect to all
    inputs.

    Logits must be finite. They are computed in the dtype of `hidden_ND` and `weight_VD`, as inference engines do;
    everything after in float32. N = 0 gives empty results that still carry gradients (zeros), which keeps sharded
    parameters in step.
    """
    assert temperature > 0.0 and chunk_size > 0
    logp_N, entropy_N = _ChunkedLogProbs.apply(hidden_ND, weight_VD, bias_V, targets_N, temperature, chunk_size)
    return logp_N, entropy_N


def log_softmax_of_rows(hidden_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, temperature: float) -> Tensor:
    """float32 [C, V]."""
    logits_CV = torch.nn.functional.linear(hidden_CD, weight_VD, bias_V)
    if temperature != 1.0:
        logits_CV = logits_CV.float().div_(temperature)
    return torch.log_softmax(logits_CV, dim=-1, dtype=torch.float32)


class _ChunkedLogProbs(torch.autograd.Function):
    """Saves only its inputs. With p = softmax(z / T): d logp_t / dz = (onehot_t - p) / T and dH / dz_j = -p_j (log
    p_j + H) / T.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        temperature: float,
        chunk_size: int,
    ) -> tuple[Tensor, Tensor]:
        num_rows = hidden_ND.shape[0]
        logp_N = hidden_ND.new_empty(num_rows, dtype=torch.float32)
        entropy_N = torch.empty_like(logp_N)
        for rows in _chunks(num_rows, chunk_size):
            logp_CV = log_softmax_of_rows(hidden_ND[rows], weight_VD, bias_V, temperature)
            logp_N[rows] = logp_CV.gather(1, targets_N[rows, None]).squeeze(1)
            entropy_N[rows] = -logp_CV.exp().mul_(logp_CV).sum(dim=1)
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, targets_N, entropy_N)
        ctx.temperature, ctx.chunk_size = temperature, chunk_size
        ctx.set_materialize_grads(False)
        return logp_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads_N: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, bias_V, targets_N, entropy_N = ctx.saved_tensors
        grad_logp_N, grad_entropy_N = grads_N
        if grad_logp_N is None:
            grad_logp_N = torch.zeros_like(entropy_N)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden_ND = torch.zeros_like(hidden_ND) if needs_hidden else None
        # float32 over chunks: adding chunk after chunk in bf16 would lose what the matrix product had kept
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if needs_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=torch.float32) if needs_bias else None
        for rows in _chunks(hidden_ND.shape[0], ctx.chunk_size):
            logp_CV = log_softmax_of_rows(hidden_ND[rows], weight_VD, bias_V, ctx.temperature)
            grad_CV = logp_CV.exp()
            if grad_entropy_N is None:
                grad_CV.mul_(-grad_logp_N[rows, None])
            else:
                pull_CV = logp_CV.add_(entropy_N[rows, None]).mul_(-grad_entropy_N[rows, None])
                grad_CV.mul_(pull_CV.sub_(grad_logp_N[rows, None]))
            grad_CV.scatter_add_(1, targets_N[rows, None], grad_logp_N[rows, None])
            if ctx.temperature != 1.0:
                grad_CV.div_(ctx.temperature)
            grad_CV = grad_CV.to(hidden_ND.dtype)
            if grad_hidden_ND is not None:
                torch.mm(grad_CV, weight_VD, out=grad_hidden_ND[rows])
            if grad_weight_VD is not None:
                _add_product(grad_weight_VD, grad_CV.T, hidden_ND[rows])
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(dim=0)
        return (
            grad_hidden_ND,
            None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype),
            None if grad_bias_V is None else grad_bias_V.to(bias_V.dtype),
            None,
            None,
            None,
        )


def _chunks(num_rows: int, size: int) -> Iterator[slice]:
    for start in range(0, num_rows, size):
        yield slice(start, min(start + size, num_rows))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, where `total` may be of higher precision."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)
