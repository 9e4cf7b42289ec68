"""What a Hugging Face `config.json` says about a model, as far as Megatron builds it. Called by `backend.py`.

Read as JSON, not through transformers: these few keys are the same in every version, and only `rope_parameters` (new)
and `rope_theta` with `rope_scaling` (old) say the same thing in two ways.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlkit.types.errors import ConfigError

DENSE = frozenset({"llama", "qwen2", "qwen3"})
EXPERTS = frozenset({"qwen3_moe", "deepseek_v3"})
SUPPORTED = DENSE | EXPERTS
ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """Rotary position embedding."""

    kind: str
    theta: float
    scaling: dict[str, Any]
    """The other parameters of the kind, under their Hugging Face names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """Mixture-of-experts layers."""

    num_experts: int
    top_k: int
    ffn_size: int
    """Hidden size of one expert."""
    shared_size: int
    """Hidden size of all shared experts together; 0 where there are none."""
    layers: tuple[bool, ...]
    """For each layer, whether it has experts."""
    normalizes: bool
    """Whether the chosen experts' weights are made to sum to one."""
    scores: str
    """`softmax` or `sigmoid`."""
    scale: float
    """Factor on the chosen experts' weights."""
    has_bias: bool
    """Whether a bias that is no part of the weights shifts the choice (DeepSeek-V3)."""
    num_groups: int | None
    top_groups: int | None

    @property
    def num_moe_layers(self) -> int:
        return sum(self.layers)


@dataclass(frozen=True, kw_only=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434)."""

    q_rank: int | None
    """None: queries are not compressed."""
    kv_rank: int
    nope_size: int
    rope_size: int
    v_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """A decoder of one of the `SUPPORTED` families."""

    model_type: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    padding_id: int | None
    """A token whose embedding gets no gradient where it is read, as in transformers' models."""
    norm_eps: float
    is_tied: bool
    has_qkv_bias: bool
    has_qk_norm: bool
    rope: Rope
    max_positions: int | None
    experts: Experts | None
    latent: Latent | None

    def is_expert_layer(self, layer: int) -> bool:
        return self.experts is not None and self.experts.layers[layer]


def read_architecture(path: Path) -> Architecture:
    """The architecture of the checkpoint folder `path`. Raises ConfigError for what this backend cannot build."""
    file = path / "config.json"
    if not file.is_file():
        raise ConfigError(f"{path} is no Hugging Face checkpoint: it has no config.json")
    return architecture_of(json.loads(file.read_text()), str(path))


def architecture_of(config: dict[str, Any], where: str) -> Architecture:
    """The same from the parsed `config.json`; `where` is for messages."""
    kind = config.get("model_type")
    if kind not in SUPPORTED:
        raise ConfigError(
            f"{where}: --train-backend megatron does not know model_type {kind!r}; it builds "
            f"{', '.join(sorted(SUPPORTED))}. Use --train-backend fsdp, which takes any transformers model"
        )
    _refuse_what_differs(config, where)
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    latent = _latent(config) if kind == "deepseek_v3" else None
    return Architecture(
        model_type=kind,
        num_layers=config["num_hidden_layers"],
        hidden_size=hidden,
        ffn_size=config["intermediate_size"],
        num_heads=heads,
        num_kv_heads=heads if latent else config.get("num_key_value_heads") or heads,
        head_size=latent.nope_size + latent.rope_size if latent else config.get("head_dim") or hidden // heads,
        vocab_size=config["vocab_size"],
        padding_id=config.get("pad_token_id"),
        norm_eps=config["rms_norm_eps"],
        is_tied=config.get("tie_word_embeddings", False),
        has_qkv_bias=kind == "qwen2",
        has_qk_norm=kind in ("qwen3", "qwen3_moe"),
        rope=_rope(config, where),
        max_positions=config.get("max_position_embeddings"),
        experts=_experts(config, kind) if kind in EXPERTS else None,
        latent=latent,
    )


def _refuse_what_differs(config: dict[str, Any], where: str) -> None:
    """Settings that a family allows and no released model of it uses, or that only the FSDP backend handles."""
    checks = {
        "hidden_act": (config.get("hidden_act", "silu") == "silu", "silu"),
        "attention_bias": (not config.get("attention_bias"), "false"),
        "mlp_bias": (not config.get("mlp_bias"), "false"),
        "use_sliding_window": (not config.get("use_sliding_window"), "false"),
        "rope_interleave": (config.get("rope_interleave", True), "true"),
    }
    for name, (is_fine, wanted) in checks.items():
        if not is_fine:
            raise ConfigError(
                f"{where}: {name} = {config[name]}, but --train-backend megatron builds this family with {name} = "
                f"{wanted} only; use --train-backend fsdp"
            )


def _rope(config: dict[str, Any], where: str) -> Rope:
    new = config.get("rope_parameters")
    scaling = dict(new or config.get("rope_scaling") or {})
    theta = scaling.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    if kind not in ROPE_TYPES:
        raise ConfigError(
            f"{where}: rope_type {kind!r} is not built by --train-backend megatron, which knows "
            f"{', '.join(sorted(ROPE_TYPES))}; use --train-backend fsdp"
        )
    return Rope(kind=kind, theta=float(theta), scaling=scaling)


def _latent(config: dict[str, Any]) -> Latent:
    return Latent(
        q_rank=config.get("q_lora_rank"),
        kv_rank=config["kv_lora_rank"],
        nope_size=config["qk_nope_head_dim"],
        rope_size=config["qk_rope_head_dim"],
        v_size=config["v_head_dim"],
    )


def _experts(config: dict[str, Any], kind: str) -> Experts:
    num_layers = config["num_hidden_layers"]
    if kind == "deepseek_v3":
        first = config.get("first_k_dense_replace", 0)
        return Experts(
            num_experts=config["n_routed_experts"],
            top_k=config["num_experts_per_tok"],
            ffn_size=config["moe_intermediate_size"],
            shared_size=config["moe_intermediate_size"] * (config.get("n_shared_experts") or 0),
            layers=tuple(layer >= first for layer in range(num_layers)),
            normalizes=config.get("norm_topk_prob", True),
            scores="sigmoid",
            scale=float(config.get("routed_scaling_factor", 1.0)),
            has_bias=True,
            num_groups=config.get("n_group"),
            top_groups=config.get("topk_group"),
        )
    sparse_step, dense = config.get("decoder_sparse_step", 1), set(config.get("mlp_only_layers") or ())
    return Experts(
        num_experts=config.get("num_experts") or config["num_local_experts"],  # the name in older and newer files
        top_k=config["num_experts_per_tok"],
        ffn_size=config["moe_intermediate_size"],
        shared_size=0,
        layers=tuple(layer not in dense and (layer + 1) % sparse_step == 0 for layer in range(num_layers)),
        normalizes=config.get("norm_topk_prob", False),
        scores="softmax",
        scale=1.0,
        has_bias=False,
        num_groups=None,
        top_groups=None,
    )
