"""A checkpoint in fp8 made of the tiny model's: what the public ones look like, with matrices of ragged blocks."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny_model import make_tokenizer
from torch import Tensor
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from rlkit.algo.fp8 import quantise

EXCLUDED = ("lm_head", "layers.1.mlp.down_proj")
"""`modules_to_not_convert`."""


def is_quantised(name: str) -> bool:
    return "_proj." in name and "layers.1.mlp.down_proj" not in name


def save_fp8(folder: Path, *, seed: int) -> dict[str, Tensor]:
    """Write the folder in two files, with a weight and its scales apart; the tensors that it holds."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=136,
            intermediate_size=264,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=256,
            tie_word_embeddings=False,
            initializer_range=0.2,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if is_quantised(name):
            tensors[name], tensors[f"{name}_scale_inv"] = quantise(tensor)
        else:
            tensors[name] = tensor.bfloat16()
    folder.mkdir(parents=True, exist_ok=True)
    file_of = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(sorted(tensors))}
    for file in set(file_of.values()):
        save_file({name: tensors[name] for name in file_of if file_of[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": file_of}))
    config = model.config.to_dict() | {
        "architectures": ["Qwen3ForCausalLM"],
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": list(EXCLUDED),
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    GenerationConfig(eos_token_id=tokenizer.eos_token_id).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tensors
