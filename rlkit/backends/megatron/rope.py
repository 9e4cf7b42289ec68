"""Rotary angles of packed tokens, by position. Called by `model.py`.

Megatron's own tables are by place in the row; in a packed row positions restart with every sequence.

Shapes: T packed tokens, D size of the rotated part of a head.
"""

import math
from typing import Any

import torch
from torch import Tensor

from rlkit.backends.megatron.architecture import Rope


def inverse_frequencies(rope: Rope, size: int) -> tuple[Tensor, float]:
    """(float32 [D / 2], factor on cosine and sine) as transformers computes them for the rope type."""
    powers = torch.arange(0, size, 2, dtype=torch.int64).float() / size
    plain = 1.0 / rope.theta**powers
    scaling = rope.scaling
    match rope.kind:
        case "default":
            return plain, 1.0
        case "linear":
            return plain / scaling["factor"], 1.0
        case "llama3":
            return _llama3(plain, scaling), 1.0
        case "yarn":
            return _yarn(rope, size)
    raise AssertionError(rope.kind)


def angles(inverse: Tensor, positions_T: Tensor) -> Tensor:
    """float32 [T, 1, 1, D]: the angle of each token's position, halves repeated, as Megatron wants them."""
    half = positions_T.float()[:, None] * inverse
    return torch.cat([half, half], dim=-1)[:, None, None, :]


def _llama3(plain: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Llama 3.1: long wavelengths are stretched, short ones kept, a ramp between."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelengths = 2 * math.pi / plain
    smooth = (scaling["original_max_position_embeddings"] / wavelengths - low) / (high - low)
    smooth = smooth.clamp(0.0, 1.0)
    return (1 - smooth) * plain / factor + smooth * plain


def _yarn(rope: Rope, size: int) -> tuple[Tensor, float]:
    """YaRN (arXiv:2309.00071), with DeepSeek's `mscale`."""
    scaling = rope.scaling
    factor, longest = scaling["factor"], scaling["original_max_position_embeddings"]
    attention = scaling.get("attention_factor")
    if attention is None:
        mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
        if mscale and mscale_all:
            attention = yarn_scale(factor, mscale) / yarn_scale(factor, mscale_all)
        else:
            attention = yarn_scale(factor, 1.0)

    def dim_of(rotations: float) -> float:
        return size * math.log(longest / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dim_of(scaling.get("beta_fast") or 32), dim_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(size // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    powers = torch.arange(0, size, 2).float() / size
    kept = 1.0 / rope.theta**powers
    return kept / factor * ramp + kept * (1 - ramp), float(attention)


def yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
