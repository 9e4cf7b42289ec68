"""Flags that scripts written for slime bring along and rlkit has no use for -> what to do about each.

Only for error messages: an unknown flag that stands here is answered with this sentence instead of the nearest name.
"""

from collections.abc import Mapping
from types import MappingProxyType

_PACKED = "micro-batches are always packed up to --max-tokens-per-gpu; remove it"
_SHARDED = "FSDP shards the model over all training ranks; remove it"
_CHECKPOINTING = "use --gradient-checkpointing"
_TURNS = "--colocate decides who sleeps when; remove it"
_FROM_MODEL = "the architecture is read from --hf-checkpoint; remove it"

SLIME_ONLY: Mapping[str, str] = MappingProxyType(
    {
        "use_dynamic_batch_size": _PACKED,
        "micro_batch_size": _PACKED,
        "balance_data": "work is always balanced over the training ranks; remove it",
        "offload": _TURNS,
        "offload_train": _TURNS,
        "offload_rollout": _TURNS,
        "bf16": "use --dtype bfloat16",
        "fp32": "use --dtype float32",
        "optimizer": "the optimizer is AdamW; remove it",
        "use_distributed_optimizer": "optimizer states are always sharded; remove it",
        "accumulate_allreduce_grads_in_fp32": "gradients are always reduced in float32; remove it",
        "attention_backend": "use --attn-implementation",
        "recompute_granularity": _CHECKPOINTING,
        "recompute_method": _CHECKPOINTING,
        "recompute_num_layers": _CHECKPOINTING,
        "tensor_model_parallel_size": _SHARDED,
        "pipeline_model_parallel_size": _SHARDED,
        "expert_model_parallel_size": _SHARDED,
        "expert_tensor_parallel_size": _SHARDED,
        "sequence_parallel": _SHARDED,
        "context_parallel_size": "every sample stays whole on one rank; remove it",
        "attention_dropout": _FROM_MODEL,
        "hidden_dropout": _FROM_MODEL,
        "attention_softmax_in_fp32": _FROM_MODEL,
        "num_layers": _FROM_MODEL,
        "hidden_size": _FROM_MODEL,
        "ffn_hidden_size": _FROM_MODEL,
        "num_attention_heads": _FROM_MODEL,
        "vocab_size": _FROM_MODEL,
        "custom_config_path": "use --config FILE.toml",
        "eval_config": "name the data sets with --eval-prompt-data NAME PATH ...",
        "wandb_key": "set the environment variable WANDB_API_KEY",
        "wandb_team": "set the environment variable WANDB_ENTITY",
    }
)
