"""A mixture of experts in fp8 on the embedded engine; transformers fuses experts that checkpoints have apart."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen3MoeConfig

from rlkit.algo.fp8 import dequantise, quantise
from rlkit.engines.embedded.model import load_model

NUM_EXPERTS, HIDDEN, WIDE = 2, 136, 24


def test_experts_are_dequantised_into_their_place(tmp_path: Path):
    config = Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=HIDDEN,
        intermediate_size=48,
        moe_intermediate_size=WIDE,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=1,
        tie_word_embeddings=False,
    )
    generator = torch.Generator().manual_seed(0)
    layer = "model.layers.0."
    plain = {
        "model.embed_tokens.weight": (32, HIDDEN),
        "lm_head.weight": (32, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        f"{layer}input_layernorm.weight": (HIDDEN,),
        f"{layer}post_attention_layernorm.weight": (HIDDEN,),
        f"{layer}self_attn.q_norm.weight": (16,),
        f"{layer}self_attn.k_norm.weight": (16,),
        f"{layer}mlp.gate.weight": (NUM_EXPERTS, HIDDEN),
    }
    quantised = {
        f"{layer}self_attn.q_proj.weight": (64, HIDDEN),
        f"{layer}self_attn.k_proj.weight": (32, HIDDEN),
        f"{layer}self_attn.v_proj.weight": (32, HIDDEN),
        f"{layer}self_attn.o_proj.weight": (HIDDEN, 64),
    }
    for expert in range(NUM_EXPERTS):
        for part, shape in {"gate": (WIDE, HIDDEN), "up": (WIDE, HIDDEN), "down": (HIDDEN, WIDE)}.items():
            quantised[f"{layer}mlp.experts.{expert}.{part}_proj.weight"] = shape
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in plain.items()}
    expected: dict[str, torch.Tensor] = {}
    for name, shape in quantised.items():
        values, scale = quantise(torch.randn(shape, generator=generator))
        tensors |= {name: values, f"{name}_scale_inv": scale}
        expected[name] = dequantise(values, scale, dtype=torch.float32)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    content = config.to_dict() | {"architectures": ["Qwen3MoeForCausalLM"], "quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(content))
    loaded = load_model(str(tmp_path), device="cpu", dtype="float32", trust_remote_code=False).state_dict()
    for expert in range(NUM_EXPERTS):
        prefix = f"{layer}mlp.experts.{expert}."
        gate_up = torch.cat([expected[f"{prefix}{part}_proj.weight"] for part in ("gate", "up")])
        assert torch.equal(loaded[f"{layer}mlp.experts.gate_up_proj"][expert], gate_up)
        assert torch.equal(loaded[f"{layer}mlp.experts.down_proj"][expert], expected[f"{prefix}down_proj.weight"])
    assert torch.equal(loaded[f"{layer}self_attn.o_proj.weight"], expected[f"{layer}self_attn.o_proj.weight"])
    assert torch.equal(loaded["model.norm.weight"], tensors["model.norm.weight"])
