"""Sums over the tokens of each packed sequence, and back. Called by every term that speaks of whole sequences.

Shapes: S packed sequences, T packed tokens.

A statistic of a sequence (GSPO's ratio, the sequence levels of importance weights) is always made from such sums. Where
a sequence is spread over several ranks, each holds its own share of the tokens, and `sum_shares` adds the partial sums
up over them; nothing else has to know.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

SumShares = Callable[[Tensor], Tensor]
"""Turns this rank's partial sums into those of all ranks that it shares something with. Collective where it adds."""


def unshared(partial: Tensor) -> Tensor:
    """Everything is here already."""
    return partial


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequences:
    """Where the sequences of a packed batch begin and end on this rank."""

    lengths_S: Tensor  # int64 [S]; tokens that lie on this rank, perhaps none
    num_tokens: int  # T
    sum_shares: SumShares = unshared

    @classmethod
    def of(cls, cu_seqlens: Tensor, num_tokens: int, sum_shares: SumShares = unshared) -> "Sequences":
        """From int [S+1] offsets. `num_tokens` is their last entry, given so that nothing waits for the device."""
        return cls(lengths_S=cu_seqlens.diff().long(), num_tokens=num_tokens, sum_shares=sum_shares)

    def sums(self, *values_T: Tensor) -> Tensor:
        """[len(values), S]: each value summed over each sequence, without gradient. One reduction for all of them.

        Not by scattered additions, whose order and so whose last bits differ from run to run on a GPU.
        """
        columns_TK = torch.stack([value_T.detach() for value_T in values_T], dim=1)
        sums_SK = torch.segment_reduce(columns_TK, "sum", lengths=self.lengths_S, axis=0, initial=0.0, unsafe=True)
        return self.sum_shares(sums_SK.T.contiguous())

    def spread(self, values_S: Tensor) -> Tensor:
        """[T]: each token gets the value of its sequence."""
        return values_S.repeat_interleave(self.lengths_S, output_size=self.num_tokens)

    def means(self, value_T: Tensor, mask_T: Tensor) -> Tensor:
        """[S]: mean of a value over the tokens that the mask keeps; 0 where it keeps none. No gradient."""
        kept_T = torch.where(mask_T, value_T.detach(), value_T.new_zeros(()))
        total_S, count_S = self.sums(kept_T, mask_T.to(value_T.dtype))
        return total_S / count_S.clamp(min=1.0)
