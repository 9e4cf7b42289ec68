"""Variable-length attention kernels on CUDA: flash-attn's and torch's own, causal, aligned at the sequences' ends where
there are fewer queries than keys. Called by `packed.py`.

Shapes: q queries and k keys of all sequences together, H query heads, K key/value heads, D head size.
"""

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rlkit.backends.attention.context import DeviceStretch


def fa2_stretch(q: Tensor, k: Tensor, v: Tensor, stretch: DeviceStretch, scale: float, window: int | None) -> Tensor:
    """An `AttendStretch` by flash-attn, for whole sequences only."""
    assert window is None
    return fa2(q, k, v, stretch.cu_queries, stretch.cu_keys, stretch.max_queries, stretch.max_keys, scale)


def fa2(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, scale: float) -> Tensor:
    kernel = importlib.import_module("flash_attn.flash_attn_interface").flash_attn_varlen_func
    deterministic = torch.are_deterministic_algorithms_enabled()
    # causal is aligned at the sequences' ends where there are fewer queries than keys
    return kernel(q, k, v, cu_q, cu_k, max_q, max_k, softmax_scale=scale, causal=True, deterministic=deterministic)


def fa3(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float) -> Tensor:
    """FlashAttention-3 (Hopper), whole sequences only."""
    kernel = importlib.import_module("flash_attn_interface").flash_attn_varlen_func
    deterministic = torch.are_deterministic_algorithms_enabled()
    ends, longest = cu_seqlens, max_seqlen
    out = kernel(q, k, v, ends, ends, longest, longest, softmax_scale=scale, causal=True, deterministic=deterministic)
    return out[0] if isinstance(out, tuple) else out  # early releases return the log-sum-exp too


def varlen_stretch(q: Tensor, k: Tensor, v: Tensor, stretch: DeviceStretch, scale: float, window: int | None) -> Tensor:
    """An `AttendStretch` by torch's kernel."""
    return varlen(q, k, v, stretch.cu_queries, stretch.cu_keys, stretch.max_queries, stretch.max_keys, scale, window)


def varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    window: int | None,
) -> Tensor:
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
    return kernel(q, k, v, cu_q, cu_k, max_q, max_k, **options)


@cache
def _varlen_kernel() -> tuple[Callable[..., Tensor], frozenset[str]]:
    """torch's kernel and the names of its arguments: torch 2.13 demands `enable_gqa=True` for grouped heads, 2.11
    does not know it.
    """
    kernel = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    return kernel, frozenset(inspect.signature(kernel).parameters)


def has_varlen() -> bool:
    return importlib.util.find_spec("torch.nn.attention.varlen") is not None


def has_flash_attn_3() -> bool:
    return importlib.util.find_spec("flash_attn_interface") is not None


def has_flash_attn() -> bool:
    """Asks for the interface module: `flash_attn` alone may be a namespace that another package leaves behind."""
    if importlib.util.find_spec("flash_attn") is None:
        return False
    return importlib.util.find_spec("flash_attn.flash_attn_interface") is not None
