"""Packed batches of random sequences for property tests, in float64, and the loops that say what is meant.

The loops go over the tokens of one sequence after the other, in Python floats: slow and obvious.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from rlkit.algo.sequences import Sequences

settings.register_profile("algo", derandomize=True, deadline=None, max_examples=80)
settings.load_profile("algo")

EXACT = {"rtol": 1e-10, "atol": 1e-10}


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Sequences of tokens: a mask and a value a column for each."""

    masks: list[list[bool]]
    columns: list[list[list[float]]]

    @property
    def mask_T(self) -> Tensor:
        return torch.tensor([kept for mask in self.masks for kept in mask], dtype=torch.bool)

    @property
    def cu_seqlens(self) -> Tensor:
        return torch.tensor([0, *(len(mask) for mask in self.masks)]).cumsum(0).int()

    @property
    def max_len(self) -> int:
        return max(len(mask) for mask in self.masks)

    @property
    def sequences(self) -> Sequences:
        return Sequences.of(self.cu_seqlens, self.mask_T.numel())

    def column(self, number: int, *, garbage: float | None = None) -> Tensor:
        """[T]; `garbage` at masked positions."""
        flat_T = torch.tensor([v for values in self.columns[number] for v in values], dtype=torch.float64)
        return flat_T if garbage is None else torch.where(self.mask_T, flat_T, garbage)

    def kept(self, number: int) -> list[list[float]]:
        """The column's values at trained tokens, by sequence."""
        return [
            [value for value, is_kept in zip(values, mask, strict=True) if is_kept]
            for values, mask in zip(self.columns[number], self.masks, strict=True)
        ]

    def put_back(self, by_sequence: Sequence[Sequence[float]]) -> Tensor:
        """The inverse of `kept`: [T], 0 at masked tokens."""
        flat: list[float] = []
        for values, mask in zip(by_sequence, self.masks, strict=True):
            rest = iter(values)
            flat += [next(rest) if is_kept else 0.0 for is_kept in mask]
        return torch.tensor(flat, dtype=torch.float64)


@st.composite
def packed(draw: st.DrawFn, *, num_columns: int, low: float = -3.0, high: float = 0.0) -> Packed:
    """One to five sequences of one to nine tokens; masks may be empty."""
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    masks = [draw(st.lists(st.booleans(), min_size=n, max_size=n)) for n in lengths]
    number = st.floats(low, high, allow_nan=False, width=32)
    columns = [[draw(st.lists(number, min_size=n, max_size=n)) for n in lengths] for _ in range(num_columns)]
    return Packed(masks=masks, columns=columns)


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
