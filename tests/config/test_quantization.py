"""Which quantised checkpoints a run may start from, and which of their tensors are quantised."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rlkit.config.errors import ConfigError
from rlkit.config.load import load_config
from rlkit.config.quantization import Fp8Blocks, parse_quantization, quantized_names, read_quantization
from rlkit.config.rules import check_paths

BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}},
}


def folder_with(path: Path, quantization: dict[str, Any] | None, names: tuple[str, ...] = ()) -> str:
    path.mkdir()
    config = {"model_type": "qwen3"} | ({"quantization_config": quantization} if quantization is not None else {})
    (path / "config.json").write_text(json.dumps(config))
    if names:
        save_file({name: torch.zeros(2, 2) for name in names}, path / "model.safetensors")
    return str(path)


def test_what_is_read(tmp_path):
    assert read_quantization(folder_with(tmp_path / "plain", None)) is None
    assert read_quantization(str(tmp_path / "absent")) is None
    assert read_quantization(folder_with(tmp_path / "fp8", BLOCKS)) == Fp8Blocks()
    full = BLOCKS | {"modules_to_not_convert": ["lm_head"], "scale_fmt": "ue8m0"}
    assert parse_quantization(full, place="x") == Fp8Blocks(excluded=("lm_head",), power_of_two=True)


REFUSED = {
    "per tensor": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "one scale a tensor"),
    "other blocks": (BLOCKS | {"weight_block_size": [1, 32]}, r"weight_block_size \[1, 32\]"),
    "int4": (INT4, r"quantised as compressed-tensors \(int, 4 bits\)"),
    "awq": ({"quant_method": "awq", "bits": 4}, r"quantised as awq \(4 bits\)"),
    "e5m2": (BLOCKS | {"fmt": "e5m2"}, "format 'e5m2', not e4m3"),
    "static": (BLOCKS | {"activation_scheme": "static"}, "activation_scheme 'static'"),
}


@pytest.mark.parametrize("quantization, message", REFUSED.values(), ids=REFUSED)
def test_what_is_refused_before_a_launch(valid_argv, tmp_path, quantization, message):
    folder = folder_with(tmp_path / "model", quantization)
    with pytest.raises(ConfigError, match=rf"model .*{message}.*tools/convert_hf_to_fp8.py"):
        read_quantization(folder)
    argv = [word for word in valid_argv if not word.startswith("--hf-checkpoint")] + ["--hf-checkpoint", folder]
    (problem,) = [line for line in check_paths(load_config(argv).config) if "tools/convert_hf_to_fp8.py" in line]
    assert folder in problem


def test_a_quantised_reference_of_another_kind_is_refused(valid_argv, tmp_path):
    folder = folder_with(tmp_path / "reference", INT4)
    cfg = load_config([*valid_argv, "--use-kl-loss", "--kl-loss-coef", "0.1", "--ref-load", folder]).config
    assert any(folder in line and "compressed-tensors" in line for line in check_paths(cfg))


NAMES = ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_up_proj.weight", "lm_head.weight")


def test_names_come_from_the_scales(tmp_path):
    with_scales = (*NAMES, "model.layers.0.mlp.up_proj.weight_scale_inv")
    folder = folder_with(tmp_path / "model", BLOCKS, with_scales)
    assert quantized_names(folder, Fp8Blocks(excluded=("lm_head",))) == {"model.layers.0.mlp.up_proj.weight"}
    with pytest.raises(ConfigError, match=r"scales of model.layers.0.mlp.up_proj.weight .* modules_to_not_convert"):
        quantized_names(folder, Fp8Blocks(excluded=("mlp.up_proj",)))
    with pytest.raises(ConfigError, match="none of its safetensors files holds"):
        quantized_names(folder_with(tmp_path / "none", BLOCKS, NAMES), Fp8Blocks())
    index = {"weight_map": {"a.weight": "x", "a.weight_scale_inv": "y"}}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert quantized_names(folder, Fp8Blocks()) == {"a.weight"}


EXCLUDED = {
    "the module": ("lm_head", "lm_head.weight", True),
    "a parent": ("model.layers.0", "model.layers.0.mlp.up_proj.weight", True),
    "a part of the path": ("mlp.gate", "model.layers.3.mlp.gate.weight", True),
    "without model.": ("layers.1.mlp", "model.layers.1.mlp.up_proj.weight", True),
    "with model.": ("model.layers.1.mlp", "layers.1.mlp.up_proj.weight", True),
    "no part of a word": ("mlp.gate", "model.layers.3.mlp.gate_proj.weight", False),
    "not layer 10": ("model.layers.1", "model.layers.10.mlp.up_proj.weight", False),
    "another module": ("lm_head", "model.embed_tokens.weight", False),
}


@pytest.mark.parametrize("module, name, expected", EXCLUDED.values(), ids=EXCLUDED)
def test_modules_to_not_convert(module, name, expected):
    assert Fp8Blocks(excluded=(module,)).excludes(name) == expected


def test_advice_about_long_responses_counts_context_ranks(valid_argv):
    """A context-parallel row holds as many tokens as all of its ranks together."""
    from rlkit.config.rules import advice

    long = [*valid_argv, "--max-tokens-per-gpu", "16384", "--rollout-max-response-len", "32768"]
    assert any("is more than max_tokens_per_gpu = 16384" in note for note in advice(load_config(long).config))
    ranks = ["--context-parallel-size", "2", "--actor-num-gpus-per-node", "2", "--num-gpus-per-node", "2"]
    argv = [word for word in long if not word.startswith(("--actor-num-gpus", "--num-gpus-per-node"))]
    assert not any("max_tokens_per_gpu" in note for note in advice(load_config([*argv, *ranks]).config))
