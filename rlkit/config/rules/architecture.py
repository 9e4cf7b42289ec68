"""Whether a model is the one that a script describes by flags: asked before a launch, and by the dry run."""

from collections.abc import Mapping
from typing import Any

from rlkit.config.fields import all_fields
from rlkit.config.rules.paths import read_model_config
from rlkit.config.schema import ArchitectureConfig, RunConfig

NAMES: Mapping[str, tuple[str, ...]] = {
    "num_layers": ("num_hidden_layers",),
    "hidden_size": ("hidden_size",),
    "ffn_hidden_size": ("intermediate_size",),
    "num_attention_heads": ("num_attention_heads",),
    "num_query_groups": ("num_key_value_heads", "num_attention_heads"),
    "kv_channels": ("head_dim",),
    "vocab_size": ("vocab_size",),
    "norm_epsilon": ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps"),
    "num_experts": ("n_routed_experts", "num_experts", "num_local_experts"),
    "moe_ffn_hidden_size": ("moe_intermediate_size",),
    "moe_router_topk": ("num_experts_per_tok",),
}
"""Flag -> its names in config.json; the first that is there counts."""


def model_is_the_one_described(cfg: RunConfig) -> list[str]:
    """One message with all that differs."""
    given = {
        name: value
        for name in ArchitectureConfig.__dataclass_fields__
        if (value := getattr(cfg.architecture, name)) is not None
    }
    model = read_model_config(cfg.model.hf_checkpoint) if given else None
    if model is None:
        return []
    differences: list[str] = []
    for name, value in given.items():
        key, found = _found(name, model)
        if found != value:
            said = "has no such setting" if found is None else f"says {key} = {found}"
            differences.append(f"{all_fields()[name].flag} {value}, but config.json {said}")
    if not differences:
        return []
    return [
        f"{cfg.model.hf_checkpoint} is not the model that the flags describe: {'; '.join(differences)}."
        " Correct the flags (scripts/models/*.sh), or remove them: the architecture is read from the checkpoint"
    ]


def _found(name: str, model: Mapping[str, Any]) -> tuple[str, Any]:
    """(key, value) in config.json; the value is None where it does not say."""
    if name == "rotary_base":
        newer: Any = model.get("rope_parameters") or model
        return "rope_theta", newer.get("rope_theta")
    for key in NAMES[name]:
        if model.get(key) is not None:
            return key, model[key]
    if name == "kv_channels" and model.get("num_attention_heads"):
        return "hidden_size / num_attention_heads", model["hidden_size"] // model["num_attention_heads"]
    return NAMES[name][0], None
