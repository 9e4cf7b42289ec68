"""Attention over the slot cache, registered with transformers under a name of its own.

transformers calls `slot_attention` once a layer and hands on the `slots` argument that `model.py` gives to the model's
forward: a `DecodeStep` or a `PrefillPass`, which says where keys and values go and who attends to what.

Shapes: B sequences, T packed tokens, H query heads, K key-value heads, G = H / K, D head size, L cached positions.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from rlkit.algo import batch_invariant
from rlkit.engines.embedded.kv_cache import SlotCache

ATTENTION_NAME = "rlkit_slots"
MATMUL_LENGTH = 256
"""Up to this length a decode step on a CPU attends by plain matrix products."""


@dataclass(kw_only=True, slots=True)
class DecodeStep:
    """One new token for each of the sequences in slots 0..B-1."""

    cache: SlotCache
    lengths_B: Tensor
    """int64 [B]: tokens that are cached, so the new one goes to this position."""
    max_length: int
    """Largest of `lengths_B`, plus the new token."""
    is_batch_invariant: bool = False
    masks: dict[int | None, Tensor] = field(default_factory=dict)
    rows: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        """query [B, H, 1, D], key and value [B, K, 1, D] -> [B, 1, H, D]."""
        num, num_kv_heads = key.shape[:2]
        keys, values = self.cache.layer(layer, key, value)
        rows = self._rows(num, num_kv_heads, keys.shape[2])
        keys.view(-1, keys.shape[3]).index_copy_(0, rows, key.reshape(num * num_kv_heads, -1))
        values.view(-1, values.shape[3]).index_copy_(0, rows, value.reshape(num * num_kv_heads, -1))
        if self.is_batch_invariant:
            parts = [
                batch_invariant.attend(query[b], keys[b], values[b], start=length, scale=scale, window=window)
                for b, length in enumerate(self.lengths_B.tolist())
            ]
            return torch.stack(parts).transpose(1, 2)
        # The G query heads that share a key head stand as G query rows: grouped heads without repeating keys.
        query = query.reshape(num, num_kv_heads, -1, query.shape[3])
        keys, values = keys[:num, :, : self.max_length], values[:num, :, : self.max_length]
        if query.device.type == "cpu" and query.dtype == torch.float32 and self.max_length <= MATMUL_LENGTH:
            output = self._by_matmul(query, keys, values, scale, self._mask(window, query.dtype))
        else:
            mask = self._mask(window, query.dtype)
            output = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
        return output.reshape(num, 1, -1, values.shape[3])

    @staticmethod
    def _by_matmul(query: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor) -> Tensor:
        """Attention in three calls: query [B, K, G, D], keys and values [B, K, L, D] -> [B * K, G, D].

        Short sequences on a CPU; torch's fused kernel takes up to twice as long there.
        """
        num, num_kv_heads, group = query.shape[:3]
        mask = mask.expand(num, num_kv_heads, group, -1).flatten(0, 1)
        scores = torch.baddbmm(mask, query.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2), alpha=scale)
        return torch.bmm(scores.softmax(-1), values.flatten(0, 1))

    def _rows(self, num: int, num_kv_heads: int, capacity: int) -> Tensor:
        """Row of each new key in the cache block seen as [S * K * M, D]; the same for all layers of a shape."""
        rows = self.rows.get((num_kv_heads, capacity))
        if rows is None:
            device = self.lengths_B.device
            slot_heads = torch.arange(num * num_kv_heads, device=device).view(num, num_kv_heads)
            rows = (slot_heads * capacity + self.lengths_B[:, None]).flatten()
            self.rows[num_kv_heads, capacity] = rows
        return rows

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive [B, 1, 1, L]: 0 where a position is cached (and inside the window), else -inf."""
        mask = self.masks.get(window)
        if mask is None:
            positions_L = torch.arange(self.max_length, device=self.lengths_B.device)
            hidden = positions_L > self.lengths_B[:, None]
            if window is not None:
                hidden |= positions_L <= self.lengths_B[:, None] - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            mask = mask.masked_fill_(hidden, -torch.inf)[:, None, None]
            self.masks[window] = mask
        return mask


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillBlock:
    """Equally long pieces of sequences that stand next to each other in the packed row."""

    slots: list[int]
    num_tokens: int
    """Tokens of each piece."""
    start: int
    """Position of the first token; those before it are cached already. Only a block of one sequence may start late."""


@dataclass(kw_only=True, slots=True)
class PrefillPass:
    """A packed row of prompt pieces: each attends to itself and to what its slot holds, never to a neighbour."""

    cache: SlotCache
    blocks: list[PrefillBlock]
    is_batch_invariant: bool = False

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        """query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H, D]."""
        keys, values = self.cache.layer(layer, key, value)
        outputs: list[Tensor] = []
        offset = 0
        for block in self.blocks:
            end = offset + len(block.slots) * block.num_tokens
            q, k, v = (_split(tensor, offset, end, len(block.slots)) for tensor in (query, key, value))
            stop = block.start + block.num_tokens
            slots = torch.tensor(block.slots, device=query.device)
            keys[slots, :, block.start : stop] = k
            values[slots, :, block.start : stop] = v
            if block.start > 0:
                assert len(block.slots) == 1, block
                slot = block.slots[0]
                k, v = keys[slot : slot + 1, :, :stop], values[slot : slot + 1, :, :stop]
            if self.is_batch_invariant:
                rows = zip(q, k, v, strict=True)
                parts = [batch_invariant.attend(*row, start=block.start, scale=scale, window=window) for row in rows]
                output = torch.stack(parts)
            else:
                output = _causal_attention(q, k, v, scale=scale, start=block.start, window=window)
            outputs.append(output.transpose(1, 2).flatten(0, 1))
            offset = end
        return torch.cat(outputs)[None] if len(outputs) > 1 else outputs[0][None]


def _split(tensor: Tensor, start: int, end: int, num: int) -> Tensor:
    """Piece [start, end) of a packed [1, H, T, D] as [num, H, T', D]."""
    return tensor[0, :, start:end].unflatten(1, (num, -1)).transpose(0, 1)


def _causal_attention(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, start: int, window: int | None
) -> Tensor:
    """query [B, H, T, D] at positions start..start+T-1 against key [B, K, start+T, D] -> [B, H, T, D]."""
    num_tokens = query.shape[2]
    gqa = query.shape[1] != key.shape[1]
    if start == 0 and (window is None or num_tokens <= window):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=gqa)
    positions_q = torch.arange(start, start + num_tokens, device=query.device)[:, None]
    positions_k = torch.arange(start + num_tokens, device=query.device)
    visible = positions_k <= positions_q
    if window is not None:
        visible &= positions_k > positions_q - window
    return F.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scale, enable_gqa=gqa)


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    slots: DecodeStep | PrefillPass,
    scaling: float | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in place of its own attention. NotImplementedError for variants that would be computed
    wrongly."""
    unsupported = [name for name in ("softcap", "s_aux", "head_mask") if options.get(name) is not None]
    if unsupported or attention_mask is not None:
        raise NotImplementedError(f"attention with {unsupported or 'a mask of its own'}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = module.layer_idx
    assert isinstance(layer, int)
    return slots.attend(layer, query, key, value, scale, sliding_window), None


def register() -> None:
    """Make the attention known to transformers. No mask function is registered, so models build no mask."""
    AttentionInterface.register(ATTENTION_NAME, slot_attention)
