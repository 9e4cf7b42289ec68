"""Keys and values of the sequences that are being decoded, one slot a sequence.

Active sequences fill slots 0..B-1 without holes, so a decode step attends over the plain view `cache[:B, :, :L]`
instead of gathering pages. The block grows when a longer sequence or another slot is needed, and is handed back whole
when the engine sleeps. Used by `model.py` and `attention.py`, on the engine thread only.

Shapes: S slots, H key-value heads, M positions per slot, D head size.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

LENGTH_STEP = 64
"""Positions are allocated in multiples of this."""
GROWTH = 1.5
"""A block that is too small grows by at least this factor, so that copies stay rare."""


class SlotCache:
    """One key and one value block [S, H, M, D] a layer, made when the layer first runs."""

    def __init__(self, *, max_slots: int, max_length: int) -> None:
        self._max_slots = max_slots
        self._max_length = max_length
        self.max_tokens: int | None = None
        """Slots x positions above which nothing is allocated ahead of need; None is unlimited."""
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self.num_slots = 0
        self.length = 0
        """Positions M that every slot has."""

    @property
    def num_bytes(self) -> int:
        return sum(block.numel() * block.element_size() for block in self._blocks())

    def reserve(self, num_slots: int, length: int) -> None:
        """Make room for `length` tokens in each of the first `num_slots` slots; what they hold stays, what other slots
        hold may be lost."""
        assert num_slots <= self._max_slots and length <= self._max_length, (num_slots, length)
        if num_slots <= self.num_slots and length <= self.length:
            return
        grown_slots, grown_length = self.num_slots, self.length
        if num_slots > grown_slots:
            grown_slots = min(self._max_slots, max(num_slots, int(grown_slots * GROWTH)))
        if length > grown_length:
            grown_length = self._rounded(max(length, int(grown_length * GROWTH)))
        if self.max_tokens is not None and grown_slots * grown_length > self.max_tokens:
            grown_slots, grown_length = num_slots, self._rounded(length)
        kept_slots, kept_length = min(grown_slots, self.num_slots), min(grown_length, self.length)
        self.num_slots, self.length = grown_slots, grown_length
        for blocks in (self._keys, self._values):
            for layer, old in blocks.items():
                # Zeros, not uninitialised memory: a masked position has weight 0, and 0 * NaN would be NaN.
                new = old.new_zeros(grown_slots, old.shape[1], grown_length, old.shape[3])
                new[:kept_slots, :, :kept_length] = old[:kept_slots, :, :kept_length]
                blocks[layer] = new

    def _rounded(self, length: int) -> int:
        return min(self._max_length, -(-length // LENGTH_STEP) * LENGTH_STEP)

    def layer(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Key and value block of a layer; `key` and `value` [*, H, *, D] give heads, size and dtype when it is new."""
        if layer not in self._keys:
            for blocks, like in ((self._keys, key), (self._values, value)):
                blocks[layer] = like.new_zeros(self.num_slots, like.shape[1], self.length, like.shape[3])
        return self._keys[layer], self._values[layer]

    def copy_slot(self, source: int, targets: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of a slot to others."""
        for block in self._blocks():
            if len(targets) == 1:
                block[targets[0], :, :length] = block[source, :, :length]
            else:
                block[torch.tensor(targets, device=block.device), :, :length] = block[source, :, :length]

    def free(self) -> None:
        """Give all memory back."""
        self._keys.clear()
        self._values.clear()
        self.num_slots = self.length = 0

    def _blocks(self) -> Iterator[Tensor]:
        yield from self._keys.values()
        yield from self._values.values()
