"""Forward passes whose bits do not depend on what else is computed with them (`--true-on-policy-mode`, on a CPU). Used
by the trainer and by the embedded engine: the same functions, so that both give a token the same log-prob, bit for bit.

A matrix product of one row is rounded otherwise than one of sixty-four, because libraries choose another order of sums
for another shape. So every operation that mixes numbers is given one shape only:
- layers work on tiles of exactly 64 rows, the last one padded with zeros;
- attention of the query at position p is computed in the tile that holds positions 64 t .. 64 t + 63, in row p - 64 t,
  over 64 (t + 1) keys, whether the other 63 queries are there (a whole sequence) or not (one new token);
- log-probs come from tiles of 64 rows of logits.

What remains between them (residual sums, products with sines) is one rounded operation a number, the same in any shape.

Shapes: N rows, D features or head size, H query heads, K key heads, T queries, L keys, V vocabulary.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlkit.algo.logprobs import score_logits

TILE = 64


def in_tiles(run: Callable[[Tensor], Tensor], rows_ND: Tensor) -> Tensor:
    """`run`, a function of [64, D] that treats its rows alike, on [N, D]."""
    num = rows_ND.shape[0]
    padded = F.pad(rows_ND, (0, 0, 0, -num % TILE)).contiguous()
    outputs = [run(tile) for tile in padded.split(TILE)]
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[:num]


def make_batch_invariant(model: nn.Module) -> None:
    """Let every linear layer, norm and activation of a transformers model work in tiles. Call it before `fully_shard`.

    Layers that a subclass or a hook has given a `forward` of its own keep it, inside the tiles.
    """
    for module in model.modules():
        if _mixes_features(module):
            module.forward = _tiled(module.forward)


def _mixes_features(module: nn.Module) -> bool:
    """Whether the module maps the last dimension of one tensor, row by row, by more than one rounded operation."""
    if isinstance(module, nn.Linear):
        return True
    has_children = any(True for _ in module.children())
    name = type(module).__name__
    return not has_children and ("Norm" in name or "SiLU" in name or "GELU" in name or "Sigmoid" in name)


def _tiled(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def tiled(x: Tensor) -> Tensor:
        rows = in_tiles(forward, x.reshape(-1, x.shape[-1]))
        return rows.view(*x.shape[:-1], rows.shape[-1])

    return tiled


def attend(query: Tensor, key: Tensor, value: Tensor, *, start: int, scale: float, window: int | None) -> Tensor:
    """Causal attention of one sequence: query [H, T, D] at positions start .. start + T - 1, key and value [K, L, D]
    from position 0 on, L at least start + T -> [H, T, D].
    """
    stop = start + query.shape[1]
    group = query.shape[0] // key.shape[0]
    outputs = []
    for first in range(start // TILE * TILE, stop, TILE):
        begin, end = max(start, first), min(stop, first + TILE)
        rows = F.pad(query[:, begin - start : end - start], (0, 0, begin - first, first + TILE - end)).contiguous()
        keys, values = (_first_positions(x, end, first + TILE).repeat_interleave(group, 0) for x in (key, value))
        hidden = _hidden(first, window, query.device)
        scores = torch.bmm(rows, keys.transpose(1, 2)).mul(scale).masked_fill(hidden, -torch.inf)
        # a padded query looks at something too: a row without any key would be NaN, and its gradient as well
        weights = scores.softmax(-1)
        outputs.append(torch.bmm(weights, values)[:, begin - first : end - first])
    return torch.cat(outputs, dim=1)


def _first_positions(x: Tensor, known: int, count: int) -> Tensor:
    """[K, count, D]: the first `known` positions of `x`, then zeros; what stands later in `x` may be anything."""
    return F.pad(x[:, :known], (0, 0, 0, count - known)).contiguous()


def _hidden(first: int, window: int | None, device: torch.device) -> Tensor:
    """bool [64, first + 64]: True where a query of the tile (row) must not see a key."""
    queries = torch.arange(first, first + TILE, device=device)[:, None]
    keys = torch.arange(first + TILE, device=device)
    hidden = keys > queries
    return hidden if window is None else hidden | (keys <= queries - window)


def token_log_probs(logits_NV: Tensor, targets_N: Tensor, temperature_N1: Tensor | None) -> Tensor:
    """float32 [N]: log-softmax(logits / T) at the targets, as the trainer computes it from the same logits."""
    scaled_NV = logits_NV.float() if temperature_N1 is None else logits_NV.float() / temperature_N1
    num = scaled_NV.shape[0]
    padded_NV, padded_N = F.pad(scaled_NV, (0, 0, 0, -num % TILE)), F.pad(targets_N, (0, -num % TILE))
    tiles = zip(padded_NV.split(TILE), padded_N.split(TILE), strict=True)
    return torch.cat([score_logits(logits.clone(), targets, 1.0)[0] for logits, targets in tiles])[:num]
