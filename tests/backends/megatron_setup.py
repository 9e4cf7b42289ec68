"""Tiny models and runs for the tests of the Megatron backend."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from fsdp_setup import VOCAB, make_config, rank_info, save_checkpoint_dir, spread_out, tiny_qwen3
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rlkit.config.schema import MegatronConfig, RunConfig
from rlkit.types.ranks import RankInfo

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}


def tiny_llama3() -> LlamaForCausalLM:
    """Untied head, Llama 3.1's rotary scaling."""
    torch.manual_seed(1)
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False, rope_parameters=scaling))


def tiny_qwen2() -> Qwen2ForCausalLM:
    """Biases of queries, keys and values; a tied head."""
    torch.manual_seed(2)
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True))


def tiny_qwen3_deep() -> Qwen3ForCausalLM:
    """Four layers, for two stages of two runs each."""
    torch.manual_seed(5)
    sizes = SIZES | {"num_hidden_layers": 4}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=16, tie_word_embeddings=True))


def tiny_qwen3_moe() -> Qwen3MoeForCausalLM:
    """Four experts, two for each token."""
    torch.manual_seed(3)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **SIZES,
            head_dim=16,
            moe_intermediate_size=24,
            num_experts=4,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            tie_word_embeddings=False,
        )
    )


def tiny_deepseek() -> DeepseekV3ForCausalLM:
    """Latent attention, a dense layer, then experts in groups with a shared one and a correcting bias."""
    torch.manual_seed(4)
    sizes = SIZES | {"num_key_value_heads": 4}
    return DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **sizes,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_nope_head_dim=8,
            qk_rope_head_dim=8,
            v_head_dim=8,
            moe_intermediate_size=24,
            n_routed_experts=4,
            n_shared_experts=1,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            routed_scaling_factor=2.5,
            tie_word_embeddings=False,
        )
    )


MODELS = {
    "qwen3": tiny_qwen3,
    "qwen3-untied": lambda: tiny_qwen3(tied=False),
    "qwen3-deep": tiny_qwen3_deep,
    "qwen2": tiny_qwen2,
    "llama3": tiny_llama3,
    "qwen3-moe": tiny_qwen3_moe,
    "deepseek": tiny_deepseek,
}


def save_models(root: Path) -> dict[str, Path]:
    """A folder for each, by name."""
    return {name: save_checkpoint_dir(spread_out(make()), root / name) for name, make in MODELS.items()}


def hf_tensors(path: Path) -> dict[str, torch.Tensor]:
    """What the checkpoint holds."""
    from safetensors.torch import load_file

    return load_file(path / "model.safetensors")


def megatron_config(path: Path, layout: dict[str, Any], **changes: object) -> RunConfig:
    return replace(make_config(path, **changes), megatron=MegatronConfig(**layout))


def rank_of(cfg: RunConfig, rank: int, size: int, port: int) -> RankInfo:
    return replace(
        rank_info(rank, size, port, context_parallel_size=cfg.train.context_parallel_size),
        tensor_parallel_size=cfg.megatron.tensor_model_parallel_size,
        pipeline_parallel_size=cfg.megatron.pipeline_model_parallel_size,
    )


def hf_config(model: PreTrainedModel, path: Path) -> dict[str, Any]:
    model.config.save_pretrained(path)
    return json.loads((path / "config.json").read_text())
