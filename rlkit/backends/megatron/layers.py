"""The parts of Megatron's layers that are ours, and the layer specs that put them together. Called by `model.py`.

Megatron's local layers lack what packed training needs: its attention knows no packing, its norm no sequence
parallelism, and the fused ones are Transformer Engine's.

Shapes: T packed tokens, H query heads of this rank, D head size.
"""

from copy import copy
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn

from rlkit.backends.attention.op import layout_of
from rlkit.backends.attention.packed import ATTEND, PackedAttention
from rlkit.backends.megatron.architecture import Architecture
from rlkit.backends.megatron.configuration import latent_scale


class RmsNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in float32."""

    def __init__(self, *, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        # every tensor-parallel rank sees other tokens, so gradients are summed over them
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self._eps)


class PackedCoreAttention(nn.Module):
    """Packed attention in the place of Megatron's core attention.

    What Megatron calls the attention mask is the handle of the micro-batch's `PackedLayout`: a tensor, so it survives
    recomputation, where an attribute would by then belong to another micro-batch.
    """

    def __init__(
        self,
        *,
        kind: PackedAttention,
        scale: float | None = None,
        pads_values: bool = False,
        **_: Any,
    ) -> None:
        """`scale`: of the scores; by default one over the root of the head size. `pads_values`: heads of values may be
        smaller than those of keys, which fused kernels do not take.
        """
        super().__init__()
        self._attend = ATTEND[kind]
        self._scale = scale
        self._pads = pads_values and kind not in (PackedAttention.SDPA, PackedAttention.REFERENCE)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **_: Any) -> Tensor:
        """[T, 1, H, D] each -> [T, 1, H * D]."""
        q, k, v = query.squeeze(1), key.squeeze(1), value.squeeze(1)
        scale = q.shape[-1] ** -0.5 if self._scale is None else self._scale
        size, layout = v.shape[-1], layout_of(attention_mask)
        if size < q.shape[-1] and (self._pads or layout.context is not None):
            v = F.pad(v, (0, q.shape[-1] - size))
        attended = self._attend(q, k, v, layout, scale, None)[..., :size]
        return attended.reshape(attended.shape[0], 1, -1)


class GivenAngles(nn.Module):
    """In the place of latent attention's own rotary table: the angles of the row that is being computed."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.given: Tensor | None = None
        self._factor = factor

    def get_rotary_seq_len(self, *args: Any) -> int:
        return 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Tensor, and with `rope_type` yarn the factor on cosine and sine behind it."""
        assert self.given is not None
        return self.given if self._factor == 1.0 else (self.given, self._factor)


class PackedLatentAttention(MLASelfAttention):
    """Latent attention that takes the angles as other attention does, instead of counting from the row's start."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hidden_states: Tensor, attention_mask: Tensor, *, rotary_pos_emb: Any = None, **others: Any
    ) -> tuple[Tensor, Tensor | None]:
        given = rotary_pos_emb[0] if isinstance(rotary_pos_emb, tuple) else rotary_pos_emb
        table: Any = self.rotary_pos_emb
        table.given = given
        return cast("tuple[Tensor, Tensor | None]", super().forward(hidden_states, attention_mask, **others))

    def _qkv_down_projection(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Megatron would gather the keys' rotary part whole on every tensor-parallel rank, in a way whose backward pass
        forgets the gradients of the other ranks' heads. Dealt by tokens like the queries it is gathered with their sum.
        """
        q_compressed, kv_combined = super()._qkv_down_projection(hidden_states)
        if self.config.sequence_parallel:
            kv_combined = scatter_to_sequence_parallel_region(gather_from_tensor_model_parallel_region(kv_combined))
        return q_compressed, kv_combined


def set_rope_factor(layer: nn.Module, factor: float) -> None:
    """Tell a layer's attention what cosine and sine are multiplied by (YaRN)."""
    attention: Any = layer.self_attention
    if isinstance(attention, PackedLatentAttention):
        if factor != 1.0:
            attention.config = copy(attention.config)  # its table was made as for plain angles, which needs no GPU
            attention.config.rope_type = "yarn"
        setattr(attention, "rotary_pos_emb", GivenAngles(factor))  # noqa: B010  # its type is that of Megatron's tables
    else:
        attention._yarn_concentration_factor = factor


def block_spec(
    architecture: Architecture, kind: PackedAttention, *, layers: range, has_last_norm: bool
) -> TransformerBlockSubmodules:
    """The layers (0-based, of the whole model) of one stage."""
    return TransformerBlockSubmodules(
        layer_specs=[_layer_spec(architecture, kind, layer) for layer in layers],
        layer_norm=RmsNorm if has_last_norm else None,
    )


def _layer_spec(architecture: Architecture, kind: PackedAttention, layer: int) -> ModuleSpec:
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RmsNorm,
            self_attention=_latent_attention(architecture, kind)
            if architecture.latent
            else _attention(architecture, kind),
            self_attn_bda=cast(Any, get_bias_dropout_add),
            pre_mlp_layernorm=RmsNorm,
            mlp=_experts(architecture) if architecture.is_expert_layer(layer) else _dense_mlp(),
            mlp_bda=cast(Any, get_bias_dropout_add),
        ),
    )


def _attention(architecture: Architecture, kind: PackedAttention) -> ModuleSpec:
    norm = RmsNorm if architecture.has_qk_norm else None
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=cast(Any, partial(PackedCoreAttention, kind=kind)),
            linear_proj=RowParallelLinear,
            q_layernorm=norm,
            k_layernorm=norm,
        ),
    )


def _latent_attention(architecture: Architecture, kind: PackedAttention) -> ModuleSpec:
    core = ModuleSpec(
        module=PackedCoreAttention, params={"kind": kind, "scale": latent_scale(architecture), "pads_values": True}
    )
    return ModuleSpec(
        module=PackedLatentAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=ColumnParallelLinear,
            linear_q_down_proj=ColumnParallelLinear,
            linear_q_up_proj=ColumnParallelLinear,
            linear_kv_down_proj=ColumnParallelLinear,
            linear_kv_up_proj=ColumnParallelLinear,
            core_attention=core,
            linear_proj=RowParallelLinear,
            q_layernorm=RmsNorm,
            kv_layernorm=RmsNorm,
        ),
    )


def _dense_mlp() -> Any:
    return partial(
        MLP.as_mlp_submodule,
        submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
    )


def _experts(architecture: Architecture) -> Any:
    assert architecture.experts is not None
    return get_moe_module_spec_for_backend(
        backend=LocalSpecProvider(), num_experts=architecture.experts.num_experts, moe_grouped_gemm=False
    )
