"""The mixing function of fingerprints (`types/fingerprints.py`), on tensors. Used by every backend."""

import torch
from torch import Tensor

INTEGER = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""Integer dtype by element size: a fingerprint is one of bits."""


def mix_(index: Tensor, bits: Tensor) -> Tensor:
    """int64 values, in the memory of `index` (int64, place of each element in the whole tensor), of the elements
    `bits`. Multiplications wrap around, and so may the sum: its order does not matter.
    """
    index.mul_(0x1E3779B97F4A7C15).add_(bits)
    index.bitwise_xor_(index >> 32).mul_(0x2545F4914F6CDD1D)
    return index.bitwise_xor_(index >> 29).mul_(0x369DEA0F31A53F85)
