"""How many parameters a Hugging Face checkpoint has, without torch: from its safetensors headers, else its config.json.

Used by the dry run.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlkit.config.checkpoint_files import DENSE_DECODERS, config_problems, read_safetensors_header
from rlkit.config.quantization import SCALE_SUFFIX
from rlkit.config.rules.paths import read_model_config
from rlkit.types.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """Parameters of a model, tied ones counted once."""

    num_params: int
    source: Literal["safetensors", "config.json"]


def model_size(folder: str) -> ModelSize | None:
    """The size of the checkpoint in `folder`; None where neither headers nor a known architecture tell it.

    ConfigError for files that are there and cannot be right.
    """
    config = read_model_config(folder)
    if config is None:
        return None
    shapes = _tensor_shapes(Path(folder))
    if shapes:
        tied = config.get("tie_word_embeddings", False)
        counted = [shape for name, shape in shapes.items() if not (tied and name == "lm_head.weight")]
        return ModelSize(num_params=sum(math.prod(shape) for shape in counted), source="safetensors")
    if problems := config_problems(Path(folder)):
        raise ConfigError("\n".join(problems))
    num_params = _from_config(config)
    return ModelSize(num_params=num_params, source="config.json") if num_params is not None else None


def _tensor_shapes(folder: Path) -> dict[str, list[int]]:
    """Name -> shape over all safetensors files."""
    shapes: dict[str, list[int]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        header = read_safetensors_header(path)
        shapes |= {name: entry["shape"] for name, entry in header.items() if not name.endswith(SCALE_SUFFIX)}
    return shapes


def _from_config(config: dict[str, Any]) -> int | None:
    """Embeddings, attention with grouped keys, gated MLP and RMS norms of a dense decoder."""
    kind = config.get("model_type")
    if kind not in DENSE_DECODERS or config.get("mlp_bias"):
        return None
    hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or (128 if kind == "qwen3" else hidden // heads)
    queries, keys = heads * head_dim, (config.get("num_key_value_heads") or heads) * head_dim
    attention = hidden * (queries + 2 * keys) + queries * hidden
    if kind == "qwen2":  # biases on queries, keys and values
        attention += queries + 2 * keys
    if config.get("attention_bias") and kind in ("llama", "qwen3"):
        attention += queries + 2 * keys + hidden
    norms = 2 * hidden + (2 * head_dim if kind == "qwen3" else 0)
    layer = attention + 3 * hidden * config["intermediate_size"] + norms
    embeddings = config["vocab_size"] * hidden * (1 if config.get("tie_word_embeddings", False) else 2)
    return embeddings + layers * layer + hidden
