"""Log-probs and entropies of tokens from hidden states, a chunk of rows at a time. Called by the backends.

Shapes: N scored tokens, D hidden size, V vocabulary, T packed tokens, C rows of a chunk.

A log-prob is log_softmax(logits / temperature) over the whole vocabulary in float32. The [N, V] logits never exist at
once: a chunk's logits are made, reduced to N-sized results and dropped, and made again in the backward pass. At 49 k
tokens of vocabulary, 16 k tokens of logits would be 3.2 GB, three times over. What lies between the matrix products can
be compiled: then float32 logits exist in registers only.
"""

from collections.abc import Callable, Iterator
from functools import cache
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
    compiled: bool = False,
    tile: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(log-prob of each target, entropy of each distribution), both float32 [N], differentiable with respect to all
    inputs.

    Logits must be finite. They are computed in the dtype of `hidden_ND` and `weight_VD`, as inference engines do;
    everything after in float32. N = 0 gives empty results that still carry gradients (zeros), which keeps sharded
    parameters in step. `tile`: rows of every chunk, the last one filled up with zeros, instead of `chunk_size`.
    """
    assert temperature > 0.0 and chunk_size > 0
    num_rows = hidden_ND.shape[0]
    if tile is not None:
        chunk_size, missing = tile, -num_rows % tile
        hidden_ND = torch.nn.functional.pad(hidden_ND, (0, 0, 0, missing))
        targets_N = torch.nn.functional.pad(targets_N, (0, missing))
    logp_N, entropy_N = _ChunkedLogProbs.apply(
        hidden_ND, weight_VD, bias_V, targets_N, temperature, chunk_size, compiled
    )
    return logp_N[:num_rows], entropy_N[:num_rows]


ScoreLogits = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor]]
"""(logits [C, V], targets [C], temperature) -> float32 [C] each: log-prob of the target, entropy, and log of the sum of
exp(logits / temperature). May overwrite the logits.
"""

GradOfLogits = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, float], Tensor]
"""(logits [C, V], targets, log-sum-exp, entropy, gradient of log-probs, of entropies, temperature) -> gradient of the
logits [C, V], in their dtype. May overwrite the logits.
"""


def score_logits(logits_CV: Tensor, targets_C: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """The eager `ScoreLogits`."""
    scaled_CV = logits_CV.float()
    if temperature != 1.0:
        scaled_CV = scaled_CV.div_(temperature)
    top_C = scaled_CV.amax(dim=1)
    shifted_CV = scaled_CV.sub_(top_C[:, None])
    target_C = shifted_CV.gather(1, targets_C[:, None]).squeeze(1)
    weights_CV = shifted_CV.exp()
    total_C = weights_CV.sum(dim=1)
    log_total_C = total_C.log()
    entropy_C = log_total_C - weights_CV.mul_(shifted_CV).sum(dim=1) / total_C
    return target_C - log_total_C, entropy_C, log_total_C + top_C


def _grad_of_logits(
    logits_CV: Tensor,
    targets_C: Tensor,
    lse_C: Tensor,
    entropy_C: Tensor,
    grad_logp_C: Tensor,
    grad_entropy_C: Tensor | None,
    temperature: float,
) -> Tensor:
    scaled_CV = logits_CV.float()
    if temperature != 1.0:
        scaled_CV = scaled_CV.div_(temperature)
    logp_CV = scaled_CV.sub_(lse_C[:, None])
    grad_CV = logp_CV.exp()
    if grad_entropy_C is None:
        grad_CV.mul_(-grad_logp_C[:, None])
    else:
        pull_CV = logp_CV.add_(entropy_C[:, None]).mul_(-grad_entropy_C[:, None])
        grad_CV.mul_(pull_CV.sub_(grad_logp_C[:, None]))
    grad_CV.scatter_add_(1, targets_C[:, None], grad_logp_C[:, None])
    if temperature != 1.0:
        grad_CV.div_(temperature)
    return grad_CV.to(logits_CV.dtype)


def _grad_of_logits_pointwise(
    logits_CV: Tensor,
    targets_C: Tensor,
    lse_C: Tensor,
    entropy_C: Tensor,
    grad_logp_C: Tensor,
    grad_entropy_C: Tensor | None,
    temperature: float,
) -> Tensor:
    """The same without the scatter, so that a compiler can make one pass of it."""
    logp_CV = logits_CV.float() / temperature - lse_C[:, None]
    pull_CV = grad_logp_C[:, None]
    if grad_entropy_C is not None:
        pull_CV = pull_CV + grad_entropy_C[:, None] * (logp_CV + entropy_C[:, None])
    is_target_CV = torch.arange(logits_CV.shape[1], device=logits_CV.device) == targets_C[:, None]
    grad_CV = torch.where(is_target_CV, grad_logp_C[:, None], 0.0) - logp_CV.exp() * pull_CV
    return (grad_CV / temperature).to(logits_CV.dtype)


@cache
def _compiled() -> tuple[ScoreLogits, GradOfLogits]:
    return torch.compile(score_logits), torch.compile(_grad_of_logits_pointwise)


def _functions(compiled: bool) -> tuple[ScoreLogits, GradOfLogits]:
    return _compiled() if compiled else (score_logits, _grad_of_logits)


def _mark_rows(compiled: bool, *tensors: Tensor | None) -> None:
    """Tell the compiler that the number of rows varies: the last chunk is shorter."""
    if compiled:
        for tensor in tensors:
            if tensor is not None:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)


class _ChunkedLogProbs(torch.autograd.Function):
    """Saves its inputs and N-sized results only. With p = softmax(z / T): d logp_t / dz = (onehot_t - p) / T and
    dH / dz_j = -p_j (log p_j + H) / T.
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
        compiled: bool,
    ) -> tuple[Tensor, Tensor]:
        num_rows = hidden_ND.shape[0]
        compiled = compiled and num_rows > 1
        score, _ = _functions(compiled)
        logp_N = hidden_ND.new_empty(num_rows, dtype=torch.float32)
        entropy_N, lse_N = torch.empty_like(logp_N), torch.empty_like(logp_N)
        for rows in _chunks(num_rows, chunk_size):
            logits_CV = torch.nn.functional.linear(hidden_ND[rows], weight_VD, bias_V)
            targets_C = targets_N[rows]
            _mark_rows(compiled, logits_CV, targets_C)
            logp_N[rows], entropy_N[rows], lse_N[rows] = score(logits_CV, targets_C, temperature)
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, targets_N, entropy_N, lse_N)
        ctx.temperature, ctx.chunk_size, ctx.compiled = temperature, chunk_size, compiled
        ctx.set_materialize_grads(False)
        return logp_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads_N: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, bias_V, targets_N, entropy_N, lse_N = ctx.saved_tensors
        _, grad_of_logits = _functions(ctx.compiled)
        grad_logp_N, grad_entropy_N = grads_N
        if grad_logp_N is None:
            grad_logp_N = torch.zeros_like(entropy_N)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden_ND = torch.zeros_like(hidden_ND) if needs_hidden else None
        # float32 over chunks: adding chunk after chunk in bf16 would lose what the matrix product had kept
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if needs_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=torch.float32) if needs_bias else None
        for rows in _chunks(hidden_ND.shape[0], ctx.chunk_size):
            logits_CV = torch.nn.functional.linear(hidden_ND[rows], weight_VD, bias_V)
            of_rows = (targets_N[rows], lse_N[rows], entropy_N[rows], grad_logp_N[rows])
            grad_entropy_C = None if grad_entropy_N is None else grad_entropy_N[rows]
            _mark_rows(ctx.compiled, logits_CV, *of_rows, grad_entropy_C)
            grad_CV = grad_of_logits(logits_CV, *of_rows, grad_entropy_C, ctx.temperature)
            del logits_CV
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
            None,
        )


def _chunks(num_rows: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` rows, all about equally long: a last one of a single row would be compiled anew."""
    count = -(-num_rows // size)
    for number in range(count):
        yield slice(num_rows * number // count, num_rows * (number + 1) // count)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, where `total` may be of higher precision."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)
