"""Weights that are hard to quantise, by name; the CPU's and the GPU's tests share them."""

import math

import torch
from torch import Tensor


def weights() -> dict[str, Tensor]:
    """Matrices [M, N] of several dtypes."""
    generator = torch.Generator().manual_seed(0)

    def normal(rows: int, columns: int, size: float = 1.0) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * size

    zero_block = normal(256, 384)
    zero_block[128:, 128:256] = 0
    one_of_each = normal(300, 200) * torch.logspace(-30, 30, 200)
    halves = torch.arange(-128.0, 128.0).repeat(128, 1) * 3.5  # scale 1: many lie halfway between two e4m3 values
    return {
        "whole blocks": normal(256, 256, 0.02),
        "bfloat16": normal(256, 384, 0.02).bfloat16(),
        "float16": normal(128, 128, 0.02).half(),
        "ragged rows": normal(130, 128),
        "ragged columns": normal(128, 129),
        "smaller than a block": normal(3, 5),
        "one value": torch.tensor([[-0.3]]),
        "one row": normal(1, 1000),
        "no rows": torch.zeros(0, 256),
        "a block of zeros": zero_block,
        "zeros": torch.zeros(130, 130),
        "huge": normal(128, 256) * 1e37,
        "largest": torch.full((128, 128), 448 * 2.0**119),
        "tiny": normal(128, 256) * 1e-36,
        "subnormal": normal(128, 128) * 1e-40,
        "smallest float32": torch.full((4, 4), 2.0**-149),
        "sixty orders of magnitude": one_of_each,
        "ties": halves,
        "negative zeros": torch.full((128, 128), -0.0),
        "transposed": normal(200, 300).T,
    }


def not_finite() -> dict[str, Tensor]:
    """The same with one value, the last, that cannot be quantised."""
    found = {}
    for name, value in {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "3.3e38": 3.3e38}.items():
        weight = torch.ones(300, 200)
        weight[-1, -1] = value
        found[name] = weight
    return found
