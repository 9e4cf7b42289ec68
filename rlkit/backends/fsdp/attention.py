"""Causal attention inside each sequence of a packed row, for transformers models. Called from inside the model's own
layers.

Shapes: S packed sequences, T packed tokens, H query heads, K key/value heads, D head size; a bucket holds n sequences
of at most L.

transformers looks an attention up by name and hands it whatever keyword arguments the model was called with; so the
layout of a micro-batch is made once, travels as `packed_layout=`, and serves every layer. Under these names
transformers builds no mask.

No T x T mask or score matrix exists on any path, and a packed row costs what its own tokens cost:
- `fa2`: flash-attn's variable-length kernel; `varlen`: torch's. CUDA, bf16 or fp16.
- `sdpa`: sequences of like length are padded into a few dense buckets. Padding is on the right, so the causal mask
  alone keeps it out: no token looks at a later one. Any device, any dtype.
- `reference`: one sequence after the other, written out. For tests and for doubts.
"""

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

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
    VARLEN = "rlkit_packed_varlen"
    SDPA = "rlkit_packed_dense"
    REFERENCE = "rlkit_packed_reference"


def choose_attention(
    requested: Literal["auto", "flash_attention_2", "sdpa", "eager"], *, device: torch.device, dtype: torch.dtype
) -> PackedAttention:
    """The implementation that `--attn-implementation` means on this device. Raises ConfigError where it cannot run."""
    has_kernels = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    match requested:
        case "eager":
            return PackedAttention.REFERENCE
        case "sdpa":
            return PackedAttention.SDPA
        case "flash_attention_2":
            if not has_kernels:
                raise ConfigError(
                    "--attn-implementation flash_attention_2 needs CUDA and bfloat16, but the trainer computes in "
                    f"{dtype} on {device.type}; use --attn-implementation auto or sdpa"
                )
            if not _has_flash_attn():
                raise ConfigError(
                    "--attn-implementation flash_attention_2 needs the package flash-attn, which is not installed "
                    "(flash_attn.flash_attn_interface); use --attn-implementation auto for torch's own kernel"
                )
            return PackedAttention.FA2
        case "auto":
            if has_kernels and _has_flash_attn():
                return PackedAttention.FA2
            return PackedAttention.VARLEN if has_kernels and _has_varlen() else PackedAttention.SDPA


@dataclass(frozen=True, kw_only=True, slots=True)
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


def register_attention() -> None:
    """Make the implementations known to transformers. Calling it again changes nothing."""
    for name, attend in {
        PackedAttention.FA2: _fa2,
        PackedAttention.VARLEN: _varlen,
        PackedAttention.SDPA: _dense,
        PackedAttention.REFERENCE: _reference,
    }.items():
        AttentionInterface.register(name.value, _as_transformers_attention(attend))


Attend = Callable[[Tensor, Tensor, Tensor, PackedLayout, float, int | None], Tensor]
"""(query [T, H, D], key [T, K, D], value [T, K, D], layout, softmax scale, window) -> [T, H, D]. A window of w lets
a token see itself and the w - 1 before it; None is all of its sequence.
"""


def _as_transformers_attention(attend: Attend) -> Callable[..., tuple[Tensor, None]]:
    def attention(
        module: torch.nn.Module,
        query: Tensor,  # [1, H, T, D]
        key: Tensor,  # [1, K, T, D]
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_layout: PackedLayout,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        for name in ("softcap", "s_aux", "position_bias"):
            if others.get(name) is not None:
                raise ConfigError(
                    f"this model's attention uses {name}, which the packed attention of the FSDP backend lacks"
                )
        assert attention_mask is None and query.shape[0] == 1
        window = sliding_window if sliding_window is not None and sliding_window < packed_layout.max_seqlen else None
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        return attend(q, k, v, packed_layout, scale, window)[None], None

    return attention


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
        return (_varlen if _has_varlen() else _dense)(q, k, v, layout, scale, window)
    kernel = importlib.import_module("flash_attn.flash_attn_interface").flash_attn_varlen_func
    return kernel(
        q,
        k,
        v,
        layout.cu_seqlens,
        layout.cu_seqlens,
        layout.max_seqlen,
        layout.max_seqlen,
        softmax_scale=scale,
        causal=True,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


def _varlen(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, scale: float, window: int | None) -> Tensor:
    kernel, arguments = _varlen_kernel()
    repeats = q.shape[1] // k.shape[1]
    options: dict[str, Any] = {"window_size": (-1, 0) if window is None else (window - 1, 0)}
    if repeats > 1 and "enable_gqa" in arguments:
        options["enable_gqa"] = True
    elif repeats > 1:
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    if "scale" in arguments:
        options["scale"] = scale
    else:
        q = q * (scale * q.shape[-1] ** 0.5)  # the kernel divides by sqrt(D) itself
    ends, longest = layout.cu_seqlens, layout.max_seqlen
    return kernel(q, k, v, ends, ends, longest, longest, **options)


@cache
def _varlen_kernel() -> tuple[Callable[..., Tensor], frozenset[str]]:
    """torch's kernel and the names of its arguments: torch 2.13 demands `enable_gqa=True` for grouped heads, 2.11
    does not know it.
    """
    kernel = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    return kernel, frozenset(inspect.signature(kernel).parameters)


def _has_varlen() -> bool:
    return importlib.util.find_spec("torch.nn.attention.varlen") is not None


def _has_flash_attn() -> bool:
    """Asks for the interface module: `flash_attn` alone may be a namespace that another package leaves behind."""
    if importlib.util.find_spec("flash_attn") is None:
        return False
    return importlib.util.find_spec("flash_attn.flash_attn_interface") is not None
