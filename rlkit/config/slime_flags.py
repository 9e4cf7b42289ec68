"""Flags that scripts written for slime bring along and rlkit has no use for -> what to do about each.

Only for error messages: an unknown flag that stands here is answered with this sentence instead of the nearest name.
"""

from collections.abc import Mapping
from types import MappingProxyType

_PACKED = "micro-batches are always packed up to --max-tokens-per-gpu; remove it"
_SHARDED = "FSDP shards the model over all training ranks; remove it"
_CHECKPOINTING = "use --gradient-checkpointing"
_TURNS = "--colocate decides who sleeps when; remove it"
_WATCHED = "the process of every engine is watched all the time; remove it"
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
        "attention_dropout": _FROM_MODEL,
        "hidden_dropout": _FROM_MODEL,
        "attention_softmax_in_fp32": _FROM_MODEL,
        "num_layers": _FROM_MODEL,
        "hidden_size": _FROM_MODEL,
        "ffn_hidden_size": _FROM_MODEL,
        "num_attention_heads": _FROM_MODEL,
        "vocab_size": _FROM_MODEL,
        "lambd": "it belongs to PPO's critic, which is not there yet; remove it",
        "value_clip": "it belongs to PPO's critic, which is not there yet; remove it",
        "num_critic_only_steps": "it belongs to PPO's critic, which is not there yet; remove it",
        "opd_type": "the teacher always scores inside the training ranks; pass --opd-teacher-load FOLDER",
        "get_mismatch_metrics": "mismatch metrics are always reported; remove it",
        "custom_tis_function_path": "TIS, MIS and IcePop are built in: --use-tis, --tis-mode, --tis-level, --use-rs",
        "custom_pg_loss_reducer_function_path": "use --loss-constant-length or --calculate-per-token-loss",
        "disable_rewards_normalization": "use --advantage-estimator reinforce_plus_plus for rewards as they are",
        "disable_compute_advantages_and_returns": "--loss-type sft_loss computes none; remove it",
        "use_rollout_entropy": "entropy is always reported; remove it",
        "custom_config_path": "use --config FILE.toml",
        "rollout_health_check_interval": _WATCHED,
        "rollout_health_check_timeout": _WATCHED,
        "rollout_health_check_first_wait": _WATCHED,
        "rollout_sample_hook_path": "do it in the function of --custom-generate-function-path",
        "data_source_path": "prompts come from --prompt-data; choose groups with --rollout-function-path",
        "eval_function_path": "evaluation uses --custom-generate-function-path and the graders of its sets; remove it",
        "custom_convert_samples_to_train_data_path": "use --rollout-sample-filter-path or --rollout-function-path",
        "custom_rollout_log_function_path": "use --rollout-all-samples-process-path",
        "custom_eval_rollout_log_function_path": "results of evaluations are in eval.jsonl",
        "wandb_key": "set the environment variable WANDB_API_KEY",
        "wandb_team": "set the environment variable WANDB_ENTITY",
    }
)
