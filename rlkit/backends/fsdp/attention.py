"""Makes packed attention (`attention/packed.py`) known to transformers. Called by `model.py`.

transformers looks an attention up by name and hands it whatever keyword arguments the model was called with; so the
layout of a micro-batch travels as `packed_layout=`. Under these names transformers builds no mask.

Shapes: T packed tokens, H query heads, K key/value heads, D head size.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from rlkit.backends.attention.op import NO_WINDOW, packed_attention
from rlkit.backends.attention.packed import ATTEND, Attend, PackedLayout, register_kernels
from rlkit.types.errors import ConfigError


def register_attention() -> None:
    """Make the implementations known to transformers. Calling it again changes nothing."""
    register_kernels()
    for name, attend in ATTEND.items():
        AttentionInterface.register(name.value, _as_transformers_attention(name.value, attend))


def _as_transformers_attention(kind: str, attend: Attend) -> Callable[..., tuple[Tensor, None]]:
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
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        if torch.compiler.is_compiling():
            width = NO_WINDOW if sliding_window is None else sliding_window
            return packed_attention(q, k, v, packed_layout.handle, kind, scale, width)[0][None], None
        window = sliding_window if sliding_window is not None and sliding_window < packed_layout.max_seqlen else None
        return attend(q, k, v, packed_layout, scale, window)[None], None

    return attention
