"""Causal attention inside each sequence of a packed row. Called by `fsdp/attention.py` for transformers models and by
`megatron/layers.py`.

Shapes: S packed sequences, T packed tokens, H query heads, K key/value heads, D head size; a bucket holds n sequences
of at most L.

The layout of a micro-batch is made once and serves every layer.

No T x T mask or score matrix exists on any path, and a packed row costs what its own tokens cost:
- `fa2`: flash-attn's variable-length kernel; `varlen`: torch's. CUDA, bf16 or fp16.
- `sdpa`: sequences of like length are padded into a few dense buckets. Padding is on the right, so the causal mask
  alone keeps it out: no token looks at a later one. Any device, any dtype.
- `reference`: one sequence after the other, written out. For tests and for doubts.
"""

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from rlkit.algo import batch_invariant
from rlkit.backends.attention.context import ContextLayout, attend_in_context, dense_stretch
from rlkit.backends.attention.kernels import (
    fa2,
    fa2_stretch,
    fa3,
    has_flash_attn,
    has_flash_attn_3,
    has_varlen,
    varlen,
    varlen_stretch,
)
from rlkit.backends.attention.op import (
    AttentionKernel,
    by_autograd,
    new_handle,
    register_kernel,
)
from rlkit.types.errors import ConfigError

BUCKET_SLACK = 16
"""Sequences this much shorter than the longest of a bucket still join it: a few padding tokens cost less than
another kernel call.
"""

BUCKET_RATIO = 0.8
"""So do sequences of at least this share of its length; attention inside a bucket then costs at most 1.6 times the
bare work.
"""


class PackedAttention(StrEnum):
    FA2 = "rlkit_packed_fa2"
    FA3 = "rlkit_packed_fa3"
    VARLEN = "rlkit_packed_varlen"
    SDPA = "rlkit_packed_dense"
    REFERENCE = "rlkit_packed_reference"
    TILED = "rlkit_packed_tiled"


def choose_attention(
    requested: Literal["auto", "flash_attention_2", "flash_attention_3", "sdpa", "eager"],
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> PackedAttention:
    """The implementation that `--attn-implementation` means on this device. Raises ConfigError where it cannot run."""
    has_kernels = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    match requested:
        case "eager":
            return PackedAttention.REFERENCE
        case "sdpa":
            return PackedAttention.SDPA
        case "flash_attention_2" | "flash_attention_3":
            if not has_kernels:
                raise ConfigError(
                    f"--attn-implementation {requested} needs CUDA and bfloat16, but the trainer computes in "
                    f"{dtype} on {device.type}; use --attn-implementation auto or sdpa"
                )
            is_third = requested == "flash_attention_3"
            if not (has_flash_attn_3() if is_third else has_flash_attn()):
                module = "flash_attn_interface" if is_third else "flash_attn.flash_attn_interface"
                raise ConfigError(
                    f"--attn-implementation {requested} needs the package flash-attn, which is not installed "
                    f"({module}); use --attn-implementation auto for torch's own kernel"
                )
            return PackedAttention.FA3 if is_third else PackedAttention.FA2
        case "auto":
            if has_kernels and has_flash_attn():
                return PackedAttention.FA2
            return PackedAttention.VARLEN if has_kernels and has_varlen() else PackedAttention.SDPA


@dataclass(frozen=True, kw_only=True, slots=True, weakref_slot=True, eq=False)
class PackedLayout:
    """Where the sequences of one packed row lie. Made on the CPU once a micro-batch."""

    cu_seqlens: Tensor  # int32 [S+1]
    max_seqlen: int
    lengths: tuple[int, ...]
    buckets: tuple[tuple[int, int], ...]  # (n, L) of each dense bucket, in the order of `slots`
    token_of_slot: (
        Tensor  # int64 [sum of n * L]: the token that a padded slot holds; padding repeats a token of its sequence
    )
    slot_of_token: Tensor  # int64 [T]
    padding_slots: Tensor  # int64 [number of padding slots]
    context: ContextLayout | None = None  # which part of the row this rank holds, under context parallelism
    handle: Tensor = field(init=False, repr=False)  # int64 [1] on the CPU; stands for the layout in a compiled graph

    def __post_init__(self) -> None:
        object.__setattr__(self, "handle", new_handle(self))

    @property
    def is_one_dense_block(self) -> bool:
        """All sequences are equally long: the packed row is a dense batch as it stands."""
        return len(self.buckets) == 1 and self.padding_slots.numel() == 0

    def to(self, device: torch.device) -> "PackedLayout":
        if self.cu_seqlens.device == device:
            return self
        return replace(
            self,
            cu_seqlens=self.cu_seqlens.to(device, non_blocking=True),
            token_of_slot=self.token_of_slot.to(device, non_blocking=True),
            slot_of_token=self.slot_of_token.to(device, non_blocking=True),
            padding_slots=self.padding_slots.to(device, non_blocking=True),
            context=None if self.context is None else self.context.to(device),
        )


def packed_layout(cu_seqlens: Tensor) -> PackedLayout:
    """Layout of the sequences `[cu_seqlens[s], cu_seqlens[s+1])`. `cu_seqlens` (int32 [S+1]) lies on the CPU; no
    sequence is empty.
    """
    bounds: list[int] = cu_seqlens.tolist()
    lengths = tuple(end - start for start, end in pairwise(bounds))
    groups = bucket_by_length(lengths)
    buckets = tuple((len(members), lengths[members[0]]) for members in groups)
    starts_S = cu_seqlens[:-1].long()
    lengths_S = torch.tensor(lengths, dtype=torch.int64)
    tokens, paddings = [], []
    for members, (_, longest) in zip(groups, buckets, strict=True):
        chosen = torch.tensor(members)
        column = torch.arange(longest)
        last = lengths_S[chosen, None] - 1
        tokens.append((starts_S[chosen, None] + torch.minimum(column, last)).flatten())
        paddings.append((column > last).flatten())
    token_of_slot = torch.cat(tokens) if tokens else torch.zeros(0, dtype=torch.int64)
    is_padding = torch.cat(paddings) if paddings else torch.zeros(0, dtype=torch.bool)
    real_slots = (~is_padding).nonzero().squeeze(1)
    slot_of_token = torch.empty(bounds[-1], dtype=torch.int64)
    slot_of_token[token_of_slot[real_slots]] = real_slots
    return PackedLayout(
        cu_seqlens=cu_seqlens,
        max_seqlen=max(lengths, default=0),
        lengths=lengths,
        buckets=buckets,
        token_of_slot=token_of_slot,
        slot_of_token=slot_of_token,
        padding_slots=is_padding.nonzero().squeeze(1),
    )


def bucket_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Sequences of like length together, the longest of a bucket first. Equal lengths all together keep their order."""
    buckets: list[list[int]] = []
    for sequence in sorted(range(len(lengths)), key=lambda s: (-lengths[s], s)):
        longest = lengths[buckets[-1][0]] if buckets else 0
        if buckets and lengths[sequence] >= min(BUCKET_RATIO * longest, longest - BUCKET_SLACK):
            buckets[-1].append(sequence)
        else:
            buckets.append([sequence])
    return buckets


Attend = Callable[[Tensor, Tensor, Tensor, PackedLayout, float, int | None], Tensor]
"""(query [T, H, D], key [T, K, D], value [T, K, D], layout, softmax scale, window) -> [T, H, D]. A window of w lets
a token see itself and the w - 1 before it; None is all of its sequence.
"""


class _Rows(torch.autograd.Function):
    """rows[index], where backward is again a gather: `inverse` says where each row went, and the gradient of repeated
    rows is zero.

    index_select's own backward adds row by row, which on a CPU takes longer than attention itself.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, inverse: Tensor, empty: Tensor | None) -> Tensor:
        """`empty` names the rows of the *gradient* that are zero: those that `inverse` fills with a stand-in."""
        ctx.save_for_backward(inverse, empty)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inverse, empty = ctx.saved_tensors
        grad = grads[0].contiguous().index_select(0, inverse)
        return grad if empty is None else grad.index_fill_(0, empty, 0.0), None, None, None


def _dense(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, scale: float, window: int | None) -> Tensor:
    if layout.context is not None:
        return attend_in_context(q, k, v, layout.context, scale, window, dense_stretch)
    if layout.is_one_dense_block:
        (num, longest) = layout.buckets[0]
        blocks = [[x.reshape(num, longest, *x.shape[1:]) for x in (q, k, v)]]
    else:
        padded = [_Rows.apply(x, layout.token_of_slot, layout.slot_of_token, None) for x in (q, k, v)]
        sizes = [num * longest for num, longest in layout.buckets]
        blocks = [
            [x.view(num, longest, *x.shape[1:]) for x in parts]
            for (num, longest), *parts in zip(layout.buckets, *(x.split(sizes) for x in padded), strict=True)
        ]
    outputs = []
    for query, key, value in blocks:
        attended = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=None if window is None else _band(query.shape[1], window, query.device),
            is_causal=window is None,
            scale=scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        outputs.append(attended.transpose(1, 2).flatten(0, 1))
    if layout.is_one_dense_block:
        return outputs[0]
    return _Rows.apply(torch.cat(outputs), layout.slot_of_token, layout.token_of_slot, layout.padding_slots)


def _band(length: int, window: int, device: torch.device) -> Tensor:
    """bool [L, L]: True where a query (row) sees a key (column)."""
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return (distance >= 0) & (distance < window)


def _reference(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, scale: float, window: int | None) -> Tensor:
    if layout.context is not None:
        return attend_in_context(q, k, v, layout.context, scale, window, dense_stretch)
    repeats = q.shape[1] // k.shape[1]
    outputs = []
    for query, key, value in zip(*(x.split(layout.lengths) for x in (q, k, v)), strict=True):
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * scale
        visible = _band(query.shape[0], query.shape[0] if window is None else window, query.device)
        weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1, dtype=torch.float32).to(query.dtype)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, value))
    return torch.cat(outputs)


def _fa2(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, scale: float, window: int | None) -> Tensor:
    if window is not None:
        # flash-attn can be built without windows, and such a build ignores them in silence
        return (_varlen if has_varlen() else _dense)(q, k, v, layout, scale, window)
    if layout.context is not None:
        return attend_in_context(q, k, v, layout.context, scale, None, fa2_stretch)
    return fa2(q, k, v, layout.cu_seqlens, layout.cu_seqlens, layout.max_seqlen, layout.max_seqlen, scale)


def _fa3(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, scale: float, window: int | None) -> Tensor:
    if window is not None:
        return _varlen(q, k, v, layout, scale, window)
    assert layout.context is None, "a rule refuses it"
    return fa3(q, k, v, layout.cu_seqlens, layout.max_seqlen, scale)


def _fa2_forward(
    q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp [H, T]). Heads whose size is no multiple of 8, and windows, take the differentiable way."""
    if window is not None or q.shape[-1] % 8 or layout.context is not None:
        return _fa2(q, k, v, layout, scale, window), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    kernel = importlib.import_module("flash_attn.flash_attn_interface")._flash_attn_varlen_forward
    ends, longest = layout.cu_seqlens, layout.max_seqlen
    out, lse, _, _ = kernel(q, k, v, ends, ends, longest, longest, 0.0, scale, True)
    return out, lse


def _fa2_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: PackedLayout,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    if window is not None or q.shape[-1] % 8 or layout.context is not None:
        return by_autograd(_fa2).backward(grad, q, k, v, out, lse, layout, scale, window)
    kernel = importlib.import_module("flash_attn.flash_attn_interface")._flash_attn_varlen_backward
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    kernel(
        *(grad, q, k, v, out, lse, dq, dk, dv),
        *(layout.cu_seqlens, layout.cu_seqlens, layout.max_seqlen, layout.max_seqlen),
        dropout_p=0.0,
        softmax_scale=scale,
        causal=True,
        window_size_left=-1,
        window_size_right=-1,
        softcap=0.0,
        alibi_slopes=None,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return dq, dk, dv


def _varlen(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, scale: float, window: int | None) -> Tensor:
    if layout.context is not None:
        return attend_in_context(q, k, v, layout.context, scale, window, varlen_stretch)
    ends, longest = layout.cu_seqlens, layout.max_seqlen
    return varlen(q, k, v, ends, ends, longest, longest, scale, window)


def _tiled(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, scale: float, window: int | None) -> Tensor:
    """The same bits for a sequence in any pack, and for its last token alone."""
    assert layout.context is None, "a rule refuses it"
    outputs = []
    for query, key, value in zip(*(x.split(layout.lengths) for x in (q, k, v)), strict=True):
        heads = (x.transpose(0, 1) for x in (query, key, value))
        outputs.append(batch_invariant.attend(*heads, start=0, scale=scale, window=window).transpose(0, 1))
    return torch.cat(outputs)


ATTEND: Mapping[PackedAttention, Attend] = {
    PackedAttention.FA2: _fa2,
    PackedAttention.FA3: _fa3,
    PackedAttention.VARLEN: _varlen,
    PackedAttention.SDPA: _dense,
    PackedAttention.REFERENCE: _reference,
    PackedAttention.TILED: _tiled,
}


def register_kernels() -> None:
    """Make the implementations known to the operator `packed_attention`. Calling it again changes nothing."""
    for name, attend in ATTEND.items():
        register_kernel(name.value, by_autograd(attend))
    register_kernel(PackedAttention.FA2.value, AttentionKernel(_fa2_forward, _fa2_backward, keeps_lse=True))
