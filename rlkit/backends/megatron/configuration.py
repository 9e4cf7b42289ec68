"""From an architecture and the run's flags to Megatron's `TransformerConfig`. Called by `model.py`."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from rlkit.backends.megatron.architecture import Architecture, Experts, Latent
from rlkit.backends.megatron.rope import yarn_scale
from rlkit.config.schema import RunConfig


def transformer_config(
    architecture: Architecture, cfg: RunConfig, dtype: torch.dtype, *, recomputes: bool
) -> TransformerConfig:
    """Dropout is off, as everywhere: old and new log-probs must differ by the weights alone. Nothing is initialised:
    weights come from a checkpoint. Fused kernels that need apex or Transformer Engine are off.
    """
    sizes = cfg.megatron
    options: dict[str, Any] = {
        "num_layers": architecture.num_layers,
        "hidden_size": architecture.hidden_size,
        "ffn_hidden_size": architecture.ffn_size,
        "num_attention_heads": architecture.num_heads,
        "num_query_groups": architecture.num_kv_heads,
        "kv_channels": architecture.head_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": architecture.norm_eps,
        "qk_layernorm": architecture.has_qk_norm or architecture.latent is not None,
        "add_bias_linear": False,
        "add_qkv_bias": architecture.has_qkv_bias,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "perform_initialization": False,
        # a loss is a plain sum, its denominators are in the batch: no dividing by micro-batches or ranks
        "calculate_per_token_loss": True,
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",  # the only one that takes rows of different lengths
        "deallocate_pipeline_outputs": True,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
        "tensor_model_parallel_size": sizes.tensor_model_parallel_size,
        "pipeline_model_parallel_size": sizes.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": sizes.virtual_pipeline_size,
        "context_parallel_size": cfg.train.context_parallel_size,
        "expert_model_parallel_size": sizes.expert_model_parallel_size,
        "expert_tensor_parallel_size": sizes.expert_tensor_size,
        "sequence_parallel": sizes.sequence_parallel,
        "num_layers_in_first_pipeline_stage": sizes.decoder_first_pipeline_num_layers,
        "num_layers_in_last_pipeline_stage": sizes.decoder_last_pipeline_num_layers,
    }
    if sizes.virtual_pipeline_size is not None:
        # of two stages each is the other's predecessor and successor: batched messages would be mixed up
        options |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    if recomputes:
        options |= _recompute(cfg)
    if architecture.experts is not None:
        options |= _experts(architecture.experts)
    if architecture.latent is not None:
        return MLATransformerConfig(**options, **_latent(architecture, architecture.latent))
    return TransformerConfig(**options)


def _recompute(cfg: RunConfig) -> dict[str, Any]:
    sizes = cfg.megatron
    if sizes.recompute_granularity is None and cfg.train.gradient_checkpointing:
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    options: dict[str, Any] = {"recompute_granularity": sizes.recompute_granularity}
    if sizes.recompute_granularity == "full":
        options |= {
            "recompute_method": sizes.recompute_method or "uniform",
            "recompute_num_layers": sizes.recompute_num_layers or 1,
        }
    elif sizes.recompute_granularity == "selective":
        options["recompute_modules"] = ["core_attn"]
    return options


def _experts(experts: Experts) -> dict[str, Any]:
    return {
        "num_moe_experts": experts.num_experts,
        "moe_ffn_hidden_size": experts.ffn_size,
        "moe_shared_expert_intermediate_size": experts.shared_size or None,
        "moe_layer_freq": [int(has) for has in experts.layers],
        "moe_router_topk": experts.top_k,
        "moe_router_score_function": experts.scores,
        "moe_router_pre_softmax": experts.scores == "softmax" and not experts.normalizes,
        "moe_router_topk_scaling_factor": experts.scale if experts.scale != 1.0 else None,
        "moe_router_enable_expert_bias": experts.has_bias,
        "moe_router_num_groups": experts.num_groups,
        "moe_router_group_topk": experts.top_groups,
        "moe_router_bias_update_rate": 0.0,
        # no load-balancing loss: the policy objective alone decides
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": False,
    }


def _latent(architecture: Architecture, latent: Latent) -> dict[str, Any]:
    return {
        "multi_latent_attention": True,
        "q_lora_rank": latent.q_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_head_dim": latent.nope_size,
        "qk_pos_emb_head_dim": latent.rope_size,
        "v_head_dim": latent.v_size,
        "rope_type": "rope",  # any: `layers.PackedLatentAttention` is given its angles
        "rotary_base": architecture.rope.theta,
    }


def latent_scale(architecture: Architecture) -> float | None:
    """Softmax scale of latent attention: DeepSeek multiplies it by YaRN's `mscale_all_dim` squared."""
    latent, scaling = architecture.latent, architecture.rope.scaling
    if latent is None:
        return None
    scale = (latent.nope_size + latent.rope_size) ** -0.5
    if architecture.rope.kind == "yarn" and scaling.get("mscale_all_dim"):
        scale *= yarn_scale(scaling["factor"], scaling["mscale_all_dim"]) ** 2
    return scale
