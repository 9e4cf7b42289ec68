"""Parameters of each pipeline stage and of each engine GPU, counted from an architecture tensor by tensor. Pure.

tests/cli/test_megatron_plan.py compares with the tensors that the Megatron backend makes, and with public totals.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlkit.backends.megatron.architecture import Architecture, Latent

SCALE_BYTES = 4 / (128 * 128)
"""Of a weight in fp8: its share of the block's float32 scale."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerParams:
    """Parameters of one whole layer, by how they are dealt out."""

    whole: int
    """On every tensor-parallel rank: norms, routers."""
    dealt: int
    """Over tensor-parallel ranks: attention, dense MLP."""
    shared: int
    """Shared experts, over tensor-parallel ranks when trained."""
    experts: int
    """All routed experts."""
    down: int
    """Low-rank projections of latent attention: over tensor-parallel ranks when trained, whole in engines."""

    @property
    def total(self) -> int:
        return self.whole + self.dealt + self.down + self.shared + self.experts


@dataclass(frozen=True, kw_only=True, slots=True)
class RankParams:
    """Parameters on one training rank."""

    dense: int
    """Optimised over data x context parallel ranks."""
    expert: int
    """Optimised over expert-data parallel ranks."""

    @property
    def total(self) -> int:
        return self.dense + self.expert


def layer_params(architecture: Architecture, layer: int) -> LayerParams:
    hidden = architecture.hidden_size
    whole, dealt, down = _attention(architecture)
    whole += 2 * hidden
    shared = experts = 0
    if architecture.is_expert_layer(layer):
        assert architecture.experts is not None
        sparse = architecture.experts
        whole += sparse.num_experts * hidden
        shared = 3 * hidden * sparse.shared_size
        experts = sparse.num_experts * 3 * hidden * sparse.ffn_size
    else:
        dealt += 3 * hidden * architecture.ffn_size
    return LayerParams(whole=whole, dealt=dealt, shared=shared, experts=experts, down=down)


def _attention(architecture: Architecture) -> tuple[int, int, int]:
    """(whole, dealt, down)"""
    hidden, heads = architecture.hidden_size, architecture.num_heads
    if architecture.latent is not None:
        return _latent_attention(hidden, heads, architecture.latent)
    queries, keys = heads * architecture.head_size, architecture.num_kv_heads * architecture.head_size
    dealt = hidden * (queries + 2 * keys) + queries * hidden
    if architecture.has_qkv_bias:
        dealt += queries + 2 * keys
    return 2 * architecture.head_size if architecture.has_qk_norm else 0, dealt, 0


def _latent_attention(hidden: int, heads: int, latent: Latent) -> tuple[int, int, int]:
    query_size = latent.nope_size + latent.rope_size
    down = hidden * (latent.kv_rank + latent.rope_size)
    norms = latent.kv_rank
    if latent.q_rank is None:
        up = hidden * heads * query_size
    else:
        down += hidden * latent.q_rank
        norms += latent.q_rank
        up = latent.q_rank * heads * query_size
    up += latent.kv_rank * heads * (latent.nope_size + latent.v_size) + heads * latent.v_size * hidden
    return norms, up, down


def total_params(architecture: Architecture) -> int:
    """Of the whole model, tied ones once, without the layers that only predict further tokens."""
    layers = sum(layer_params(architecture, layer).total for layer in range(architecture.num_layers))
    tables = 1 if architecture.is_tied else 2
    return layers + tables * architecture.vocab_size * architecture.hidden_size + architecture.hidden_size


def rank_params(
    architecture: Architecture,
    layers: range,
    *,
    tensor: int,
    expert: int,
    expert_tensor: int,
    is_first: bool,
    is_last: bool,
) -> RankParams:
    """On a rank of the stage that holds `layers`."""
    dense = experts = 0
    for layer in layers:
        params = layer_params(architecture, layer)
        dense += params.whole + (params.dealt + params.down + params.shared) // tensor
        experts += params.experts // (expert * expert_tensor)
    table = -(-architecture.vocab_size // tensor) * architecture.hidden_size
    is_shared = architecture.is_tied and is_first and is_last
    dense += table * (is_first + is_last - is_shared) + architecture.hidden_size * is_last
    return RankParams(dense=dense, expert=experts)


def engine_weight_bytes(
    architecture: Architecture, passed: Mapping[str, Any], *, width: int, is_fp8: bool
) -> dict[str, float]:
    """Weights on one GPU of an SGLang engine of `width` GPUs, by part; `passed` are its `--sglang-*` flags.

    Under DP attention the attention of a layer is split over width / dp_size ranks and the embedding is whole; DeepEP
    keeps shared experts whole; `--sglang-moe-dense-tp-size` splits dense layers.
    """
    ranks = width // passed.get("pp_size", 1)
    attention = ranks // passed.get("dp_size", 1) if passed.get("enable_dp_attention") else ranks
    expert = passed.get("ep_size", 1)
    dense_split = passed.get("moe_dense_tp_size", ranks)
    shared_split = 1 if passed.get("moe_a2a_backend", "none") == "deepep" else ranks
    linear = 1 + SCALE_BYTES if is_fp8 else 2
    parts = {"attention": 0.0, "dense MLP": 0.0, "experts": 0.0, "shared experts": 0.0}
    layers = list(range(architecture.num_layers))
    drafts = 1 if passed.get("speculative_algorithm") and architecture.latent is not None else 0
    for layer in [*layers, *[architecture.num_layers - 1] * drafts]:
        params = layer_params(architecture, layer)
        _, dealt, _ = _attention(architecture)
        parts["attention"] += linear * params.down + 2 * params.whole
        parts["attention"] += linear * dealt / attention
        parts["dense MLP"] += linear * (params.dealt - dealt) / dense_split
        parts["shared experts"] += linear * params.shared / shared_split
        parts["experts"] += linear * params.experts / expert / (ranks // expert)
    table = 2 * architecture.vocab_size * architecture.hidden_size
    split = 1 if passed.get("enable_dp_attention") else ranks
    head_split = attention if passed.get("enable_dp_lm_head") else ranks
    parts["embedding and head"] = table / split + (0 if architecture.is_tied else table / head_split)
    if drafts:
        parts["draft's projection"] = 2.0 * 2 * architecture.hidden_size**2
    stages = passed.get("pp_size", 1)
    return {name: size / stages for name, size in parts.items() if size}


def cache_bytes_per_token(architecture: Architecture, passed: Mapping[str, Any], *, width: int) -> int:
    """Of the KV cache in bfloat16 on one GPU of an engine."""
    layers = architecture.num_layers
    if architecture.latent is not None:  # the latent is not dealt over ranks
        layers += 1 if passed.get("speculative_algorithm") else 0
        return 2 * layers * (architecture.latent.kv_rank + architecture.latent.rope_size)
    ranks = width // passed.get("pp_size", 1)
    attention = ranks // passed.get("dp_size", 1) if passed.get("enable_dp_attention") else ranks
    heads = max(1, architecture.num_kv_heads // attention)
    return 2 * 2 * layers * heads * architecture.head_size
