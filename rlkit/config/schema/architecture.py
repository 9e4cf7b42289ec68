"""What scripts for Megatron say about a model, checked against its config.json."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ArchitectureConfig:
    """The model as a script describes it (`scripts/models/*.sh`). The architecture is always read from
    `--hf-checkpoint`; what is given here must agree with it, so a script cannot train another model than it says."""

    num_layers: int | None = None
    """Transformer layers."""
    hidden_size: int | None = None
    """Size of a hidden state."""
    ffn_hidden_size: int | None = None
    """Hidden size of the dense MLP."""
    num_attention_heads: int | None = None
    """Query heads."""
    num_query_groups: int | None = None
    """Key/value heads."""
    kv_channels: int | None = None
    """Size of a head."""
    vocab_size: int | None = None
    """Rows of the embedding."""
    rotary_base: float | None = None
    """Base of the rotary position embedding."""
    norm_epsilon: float | None = None
    """Added under the root of the norm."""
    num_experts: int | None = None
    """Routed experts of a layer."""
    moe_ffn_hidden_size: int | None = None
    """Hidden size of one expert."""
    moe_router_topk: int | None = None
    """Experts of each token."""
