"""How a checkpoint's weights are quantised, read from its `quantization_config` and its safetensors headers.

rlkit knows one format: fp8 (e4m3) in blocks of 128 x 128 with a float32 scale each, as DeepSeek-V3 and Qwen3-*-FP8
have it. Training then goes on in the compute dtype, and weights are quantised on their way to the engines.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rlkit.config.checkpoint_files import read_safetensors_header
from rlkit.config.errors import ConfigError

SCALE_SUFFIX = "_scale_inv"
"""`x.weight` has its scales in `x.weight_scale_inv`; the weight is the stored value times the scale."""

_BLOCK = [128, 128]
_REMEDY = (
    "pass a bfloat16 checkpoint, or one in fp8 with weight_block_size [128, 128] (tools/convert_hf_to_fp8.py makes it"
    " from bfloat16)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Blocks:
    """fp8 e4m3 in blocks of 128 x 128."""

    excluded: tuple[str, ...] = ()
    """`modules_to_not_convert`: modules, whole or the start or a dotted part of their path, that stay as they are."""
    power_of_two: bool = False
    """Scales are powers of two (`scale_fmt` ue8m0)."""

    def excludes(self, tensor_name: str) -> bool:
        """Whether the module of this tensor stays as it is. Matches whole words of the dotted path, as SGLang does."""
        path = f".{tensor_name.rpartition('.')[0]}."
        return any(f".{module.strip('.').removeprefix('model.')}." in path for module in self.excluded)


def read_quantization(folder: str) -> Fp8Blocks | None:
    """Of the checkpoint in `folder`; None where it is not quantised or cannot be read here. ConfigError for a format
    that rlkit does not know.
    """
    try:
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None  # a rule about paths says so
    whole = cast("dict[str, Any]", config)
    found = whole.get("quantization_config") or whole.get("compression_config")
    return parse_quantization(cast("Mapping[str, Any]", found), place=folder) if found else None


def parse_quantization(found: Mapping[str, Any], *, place: str) -> Fp8Blocks:
    """From the contents of a `quantization_config`; `place` says in errors whose."""
    method = found.get("quant_method")
    if method != "fp8":
        raise ConfigError(f"{place} is quantised as {_described(found)}, which cannot be trained on; {_REMEDY}")
    block = found.get("weight_block_size")
    if block is None:
        raise ConfigError(f"{place} is in fp8 with one scale a tensor (no weight_block_size); {_REMEDY}")
    if list(block) != _BLOCK:
        raise ConfigError(f"{place} is in fp8 with weight_block_size {list(block)}; {_REMEDY}")
    if found.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise ConfigError(f"{place} is in fp8 of the format {found['fmt']!r}, not e4m3; {_REMEDY}")
    if found.get("activation_scheme", "dynamic") != "dynamic":
        raise ConfigError(
            f"{place} has the activation_scheme {found['activation_scheme']!r}: its recorded ranges would not follow"
            f" the training; {_REMEDY}"
        )
    excluded = found.get("modules_to_not_convert") or found.get("ignored_layers") or ()
    return Fp8Blocks(excluded=tuple(excluded), power_of_two=found.get("scale_fmt") == "ue8m0")


def quantized_names(folder: str, scheme: Fp8Blocks) -> frozenset[str]:
    """The tensors that are quantised: those whose scales the checkpoint holds. ConfigError where it has none, or has
    scales of a module that its own `modules_to_not_convert` lists: the engine would not look for them.
    """
    names = frozenset(
        name.removesuffix(SCALE_SUFFIX) for name in _tensor_names(Path(folder)) if name.endswith(SCALE_SUFFIX)
    )
    if not names:
        raise ConfigError(
            f"{folder} says that it is in fp8, but none of its safetensors files holds a tensor *{SCALE_SUFFIX};"
            " is it complete?"
        )
    contradicting = sorted(name for name in names if scheme.excludes(name))
    if contradicting:
        raise ConfigError(
            f"{folder} holds scales of {contradicting[0]} ({len(contradicting)} such tensors), but its"
            " modules_to_not_convert lists that module; correct its config.json"
        )
    return names


def _tensor_names(folder: Path) -> set[str]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    names: set[str] = set()
    for path in sorted(folder.glob("*.safetensors")):
        names |= read_safetensors_header(path).keys()
    return names


def _described(found: Mapping[str, Any]) -> str:
    """`compressed-tensors (int, 4 bits)`."""
    method = str(found.get("quant_method"))
    groups = found.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        return method + (f" ({found['bits']} bits)" if "bits" in found else "")
    first = next(iter(cast("dict[str, dict[str, Any]]", groups).values()))
    weights: Mapping[str, Any] = first.get("weights") or {}
    return f"{method} ({weights.get('type', '?')}, {weights.get('num_bits', '?')} bits)"
