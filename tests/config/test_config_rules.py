"""Every rule finds fault with its bad example and accepts the near miss beside it."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
from agent_examples import AGENT_EXAMPLES
from algorithm_examples import ALGORITHM_EXAMPLES
from asynchronous_examples import ASYNCHRONOUS_EXAMPLES
from critic_examples import CRITIC_EXAMPLES
from megatron_examples import MEGATRON_EXAMPLES
from trainer_examples import TRAINER_EXAMPLES

from rlkit.config.bounds import BOUNDS
from rlkit.config.fields import all_fields
from rlkit.config.flags import find, find_negated
from rlkit.config.rules import CROSS_RULES, FIELD_RULES, RULES, check, check_on
from rlkit.config.schema import RunConfig

Make = Callable[..., RunConfig]

SPLIT = {"colocate": False, "rollout_num_gpus": 2}
EVAL = {"eval_interval": 5, "eval_prompt_data": ("gsm8k", "test.jsonl")}
SFT = {"loss_type": "sft_loss", "n_samples_per_prompt": 1, "rm_type": None}
FILTER = {"dynamic_sampling_filter_path": "check_reward_nonzero_std"}
EXTERNAL = {"rollout_external_engine_addrs": ("10.0.0.5:30000", "10.0.0.6:30000")}
TWO_NODES = {"actor_num_nodes": 2, "actor_num_gpus_per_node": 8}
REPLAY = {"load_debug_rollout_data": "dump_{rollout_id}.jsonl"}

EXAMPLES: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    "gpu_is_known": [
        ({"gpu_type": "H10"}, {"gpu_type": "h100"}),
        ({"gpu_type": "T4"}, {"gpu_type": "T4", "gpu_memory_gib": 15.0}),
    ],
    "prompts_per_rollout": [
        ({"rollout_batch_size": 0}, {"rollout_batch_size": 1}),
        ({"rollout_batch_size": -4}, {"rollout_batch_size": 0, "num_rollout": 0, **EVAL}),
    ],
    "group_is_big_enough": [
        ({"n_samples_per_prompt": 1}, {"n_samples_per_prompt": 2}),
        ({"n_samples_per_prompt": 0}, {"n_samples_per_prompt": 1, "debug_rollout_only": True}),
        ({"n_samples_per_prompt": -8}, {"n_samples_per_prompt": 1, "num_rollout": 0, **EVAL}),
        ({"n_samples_per_prompt": 1, "advantage_estimator": "rloo"}, SFT),
        (
            {"n_samples_per_prompt": 1, "advantage_estimator": "reinforce_plus_plus_baseline"},
            {"n_samples_per_prompt": 1, "advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True},
        ),
        (
            {"n_samples_per_prompt": 0, "use_opd": True, "opd_teacher_load": "t"},
            {"n_samples_per_prompt": 1, "use_opd": True, "opd_teacher_load": "t"},
        ),
        ({**SFT, "n_samples_per_prompt": 0}, SFT),
    ],
    "model_is_named": [({"hf_checkpoint": ""}, {"hf_checkpoint": "m"})],
    "prompts_are_named": [
        ({"prompt_data": None}, {"prompt_data": None, "num_rollout": 0, **EVAL}),
        ({"prompt_data": None, "debug_rollout_only": True}, {"prompt_data": None, **REPLAY}),
        ({**SFT, "prompt_data": None, "debug_train_only": True}, {**SFT, "debug_train_only": True}),
    ],
    "run_has_a_length": [({"num_rollout": None}, {"num_rollout": None, "num_epoch": 1})],
    "epochs_need_a_prompt_file": [
        ({"num_rollout": None, "num_epoch": 1, "prompt_data": None, **REPLAY}, {"prompt_data": None, **REPLAY}),
    ],
    "first_step_is_before_the_end": [
        ({"start_rollout_id": 10}, {"start_rollout_id": 9}),
        ({"start_rollout_id": 11}, {"start_rollout_id": 11, "num_rollout": 12}),
    ],
    "evaluation_only_evaluates_something": [
        ({"num_rollout": 0}, {"num_rollout": 0, **EVAL}),
        ({"num_rollout": 0, **EVAL, "skip_eval_before_train": True}, {**EVAL, "skip_eval_before_train": True}),
        ({"num_rollout": 0, **EVAL, **REPLAY}, {**EVAL, **REPLAY}),
    ],
    "batch_sizes_agree": [
        ({"global_batch_size": 16, "num_steps_per_rollout": 4}, {"global_batch_size": 16, "num_steps_per_rollout": 2}),
    ],
    "rollout_fills_whole_steps": [
        ({"global_batch_size": 12}, {"global_batch_size": 8}),
        ({"global_batch_size": 64}, {"global_batch_size": 32}),
        ({"global_batch_size": 12, **SPLIT}, {"global_batch_size": 12, "debug_rollout_only": True}),
    ],
    "rollout_splits_into_steps": [({"num_steps_per_rollout": 3}, {"num_steps_per_rollout": 4})],
    "step_splits_evenly_over_ranks": [
        (
            {"global_batch_size": 8, "actor_num_gpus_per_node": 3},
            {"global_batch_size": 8, "actor_num_gpus_per_node": 4},
        ),
        ({"actor_num_gpus_per_node": 5}, {"actor_num_gpus_per_node": 8}),
        ({"num_steps_per_rollout": 16, "actor_num_gpus_per_node": 4}, {"num_steps_per_rollout": 16}),
    ],
    "ranks_split_into_context_groups": [
        (
            {"actor_num_gpus_per_node": 4, "context_parallel_size": 3},
            {"actor_num_gpus_per_node": 4, "context_parallel_size": 2},
        )
    ],
    "attention_shares_its_context": [
        (
            {"attn_implementation": "flash_attention_3", "context_parallel_size": 2},
            {"attn_implementation": "flash_attention_2", "context_parallel_size": 2},
        )
    ],
    "node_holds_its_ranks": [
        ({"num_gpus_per_node": 1}, {"num_gpus_per_node": 2}),
        ({"num_gpus_per_node": 1}, {"num_gpus_per_node": 1, "debug_rollout_only": True, "rollout_num_gpus": 1}),
    ],
    "engines_have_gpus": [
        ({"colocate": False}, SPLIT),
        ({"colocate": False, "debug_rollout_only": True}, {"colocate": False, **REPLAY}),
    ],
    "engines_divide_their_gpus": [
        (
            {**SPLIT, "rollout_num_gpus": 3, "rollout_num_gpus_per_engine": 2},
            {**SPLIT, "rollout_num_gpus_per_engine": 2},
        ),
        ({"rollout_num_gpus_per_engine": 4}, {"rollout_num_gpus_per_engine": 2}),
    ],
    "shared_gpus_hold_the_engines": [
        ({"rollout_num_gpus": 3}, {"rollout_num_gpus": 2}),
        ({"rollout_num_gpus": 4}, {**SPLIT, "rollout_num_gpus": 4}),
    ],
    "engines_stay_on_their_nodes": [
        (
            {**SPLIT, "actor_num_gpus_per_node": 1, "rollout_num_gpus": 8, "rollout_num_gpus_per_engine": 4},
            {**SPLIT, "actor_num_gpus_per_node": 4, "rollout_num_gpus": 8, "rollout_num_gpus_per_engine": 4},
        ),
        (
            {**TWO_NODES, "actor_num_nodes": 3, "rollout_num_gpus_per_engine": 12},
            {**TWO_NODES, "rollout_num_gpus_per_engine": 16},
        ),
    ],
    "transport_fits_placement": [
        ({"update_weight_transport": "nccl"}, {"update_weight_transport": "ipc"}),
        ({"update_weight_transport": "gloo"}, {**SPLIT, "update_weight_transport": "gloo"}),
        ({**SPLIT, "update_weight_transport": "ipc"}, {**SPLIT, "update_weight_transport": "nccl"}),
        ({**SPLIT, "update_weight_transport": "ipc"}, {**SPLIT, "update_weight_transport": "disk"}),
    ],
    "disk_folder_needs_disk_transport": [
        ({"update_weight_disk_dir": "w"}, {"update_weight_disk_dir": "w", "update_weight_transport": "disk"}),
    ],
    "retracted_requests_need_running_engines": [
        ({"pause_generation_mode": "retract"}, {**SPLIT, "pause_generation_mode": "retract"}),
    ],
    "sleeping_engines_are_updated_every_step": [
        ({"update_weights_interval": 2}, {**SPLIT, "update_weights_interval": 2}),
    ],
    "evaluation_sees_the_newest_weights": [
        (
            {**SPLIT, "update_weights_interval": 2, **EVAL},
            {**SPLIT, "update_weights_interval": 2, **EVAL, "eval_interval": 4},
        ),
    ],
    "external_engines_have_addresses": [
        (
            {"colocate": False, **EXTERNAL, "rollout_external_engine_addrs": ("http://a:1",)},
            {"colocate": False, **EXTERNAL},
        ),
        ({"colocate": False, "rollout_external_engine_addrs": ("a:1", "a:1")}, {"colocate": False, **EXTERNAL}),
    ],
    "external_engines_are_left_alone": [
        (EXTERNAL, {"colocate": False, **EXTERNAL}),
        ({**SPLIT, **EXTERNAL}, SPLIT),
        (
            {"colocate": False, **EXTERNAL, "rollout_num_gpus_per_engine": 2},
            {"colocate": False, **EXTERNAL, "rollout_num_gpus_per_engine": 1},
        ),
        ({"colocate": False, **EXTERNAL, "use_fault_tolerance": True}, {**SPLIT, "use_fault_tolerance": True}),
        ({"colocate": False, **EXTERNAL, "sglang": {"page_size": 16}}, {**SPLIT, "sglang": {"page_size": 16}}),
    ],
    "restarted_engines_are_on_one_node": [
        ({**SPLIT, "use_fault_tolerance": True, "debug_rollout_only": True}, {**SPLIT, "use_fault_tolerance": True}),
        (
            {**TWO_NODES, "use_fault_tolerance": True, "rollout_num_gpus_per_engine": 16},
            {**TWO_NODES, "use_fault_tolerance": True, "rollout_num_gpus_per_engine": 8},
        ),
    ],
    "embedded_engine_is_one_gpu": [
        (
            {"rollout_engine": "embedded", "rollout_num_gpus_per_engine": 2},
            {"rollout_engine": "sglang", "rollout_num_gpus_per_engine": 2},
        ),
        ({"device": "cpu", "rollout_num_gpus_per_engine": 2}, {"rollout_num_gpus_per_engine": 2}),
    ],
    "sglang_flags_need_sglang": [
        ({"rollout_engine": "embedded", "sglang": {"page_size": 16}}, {"sglang": {"page_size": 16}}),
    ],
    "sglang_device_is_the_device": [
        (
            {"device": "cpu", "rollout_engine": "sglang"},
            {"device": "cpu", "rollout_engine": "sglang", "sglang": {"device": "cpu"}},
        ),
        ({"device": "cuda", "sglang": {"device": "cpu"}}, {"sglang": {"device": "cpu"}}),
    ],
    "sglang_parallel_sizes_fit": [
        ({"sglang": {"pp_size": 2}}, {"sglang": {"pp_size": 2}, "rollout_num_gpus_per_engine": 2}),
        (
            {"sglang": {"dp_size": 2}, "rollout_num_gpus_per_engine": 2},
            {"sglang": {"dp_size": 2, "enable_dp_attention": True}, "rollout_num_gpus_per_engine": 2},
        ),
        ({"sglang": {"ep_size": 2}}, {"sglang": {"ep_size": 2}, "rollout_num_gpus_per_engine": 2}),
        ({"sglang": {"pp_size": 0}}, {"sglang": {"pp_size": 1}}),
    ],
    "sglang_memory_is_a_fraction": [
        ({"sglang": {"mem_fraction_static": 1.0}}, {"sglang": {"mem_fraction_static": 0.9}}),
        ({"sglang": {"mem_fraction_static": 0.0}}, {"sglang": {"mem_fraction_static": 0.1}}),
    ],
    "flash_attention_has_its_dtype": [
        (
            {"attn_implementation": "flash_attention_2", "dtype": "float32"},
            {"attn_implementation": "flash_attention_2", "dtype": "bfloat16"},
        ),
        (
            {"attn_implementation": "flash_attention_2", "device": "cpu"},
            {"attn_implementation": "sdpa", "device": "cpu"},
        ),
    ],
    "template_arguments_need_the_template": [
        (
            {"apply_chat_template_kwargs": {"enable_thinking": False}},
            {"apply_chat_template_kwargs": {"enable_thinking": False}, "apply_chat_template": True},
        ),
    ],
    "columns_differ": [({"label_key": "input"}, {"label_key": "input", "input_key": "question"})],
    "slices_are_readable": [
        ({"prompt_data": "a.jsonl@[1:2:3]"}, {"prompt_data": "a.jsonl@[-3:]"}),
        ({"prompt_data": "a.jsonl@[1-2]"}, {"prompt_data": "mail@home/a.jsonl"}),
        ({**EVAL, "eval_prompt_data": ("a", "a.jsonl@[3]")}, {**EVAL, "eval_prompt_data": ("a", "a.jsonl@[:3]")}),
    ],
    "responses_fit_the_context": [
        ({"rollout_max_context_len": 1024}, {"rollout_max_context_len": 1025}),
        (
            {**EVAL, "rollout_max_context_len": 1100, "eval_max_response_len": 1100},
            {**EVAL, "rollout_max_context_len": 1100, "eval_max_response_len": 1099},
        ),
    ],
    "prompts_leave_room": [
        (
            {"rollout_max_prompt_len": 2000, "rollout_max_context_len": 2000},
            {"rollout_max_prompt_len": 1999, "rollout_max_context_len": 2000},
        ),
    ],
    "one_grader_is_named": [
        ({"custom_rm_path": "pkg.fn"}, {"custom_rm_path": "pkg.fn", "rm_type": None}),
        ({"rm_type": None}, {"rm_type": None, **REPLAY}),
        ({"rm_type": None, "num_rollout": 0, **EVAL}, SFT),
    ],
    "grader_is_known": [
        ({"rm_type": "maths"}, {"rm_type": "boxed_math"}),
        ({"rm_type": "Exact"}, {"rm_type": "exact"}),
    ],
    "over_sampling_fills_the_batch": [({"over_sampling_batch_size": 3}, {"over_sampling_batch_size": 4})],
    "tried_groups_fill_the_batch": [
        (
            {"dynamic_sampling_max_groups": 9, "over_sampling_batch_size": 10},
            {"dynamic_sampling_max_groups": 10, "over_sampling_batch_size": 10},
        ),
        ({"dynamic_sampling_max_groups": 3}, {"dynamic_sampling_max_groups": 4}),
    ],
    "rewards_of_a_group_can_differ": [
        (
            {"n_samples_per_prompt": 1, "debug_rollout_only": True, **FILTER},
            {"n_samples_per_prompt": 2, "debug_rollout_only": True, **FILTER},
        ),
    ],
    "continuing_needs_groups_that_are_cut_off": [
        ({"partial_rollout": True}, {"partial_rollout": True, "over_sampling_batch_size": 5}),
        ({"buffer_filter_path": "pop_first"}, {"buffer_filter_path": "pop_first", **FILTER}),
        ({"partial_rollout": True, "over_sampling_batch_size": 4}, {"partial_rollout": True, **FILTER}),
    ],
    "partial_options_need_partial_rollouts": [
        (
            {"mask_offpolicy_in_partial_rollout": True, **FILTER},
            {"mask_offpolicy_in_partial_rollout": True, **FILTER, "partial_rollout": True},
        ),
        (
            {"partial_rollout_max_continuations": 3, **FILTER},
            {"partial_rollout_max_continuations": 3, **FILTER, "partial_rollout": True},
        ),
    ],
    "one_thing_chooses_the_groups": [
        ({"rollout_function_path": "a.b", **FILTER}, {"rollout_function_path": "a.b", "partial_rollout": True}),
    ],
    "choosing_groups_needs_engines": [({**SFT, "over_sampling_batch_size": 9}, SFT)],
    "functions_are_named_by_path": [
        ({"dynamic_sampling_filter_path": "nonzero"}, FILTER),
        ({"rm_type": None, "custom_rm_path": "grade.py"}, {"rm_type": None, "custom_rm_path": "grade.py:grade"}),
        ({"rm_type": None, "custom_rm_path": "grade"}, {"rm_type": None, "custom_rm_path": "a.b.grade"}),
        ({"rm_type": None, "custom_rm_path": "dir/x.py.grade"}, {"rm_type": None, "custom_rm_path": "dir/x.py:grade"}),
    ],
    "grader_has_labels": [
        ({"label_key": None}, {"label_key": None, "rm_type": "random"}),
        ({"label_key": None, **EVAL, "eval_label_key": "label"}, {**EVAL, "eval_label_key": "answer"}),
        (
            {"label_key": None, "num_rollout": 0, **EVAL},
            {"label_key": None, "num_rollout": 0, **EVAL, "eval_label_key": "label"},
        ),
    ],
    "reward_server_has_an_address": [
        ({"rm_type": "remote_rm"}, {"rm_type": "remote_rm", "rm_url": "http://a:1/rm"}),
        ({"rm_url": "a:1"}, {"rm_url": "https://a:1"}),
        (
            {"rm_type": "reward_model", "rm_url": "http://a:1"},
            {"rm_type": "reward_model", "rm_url": "http://a:1", "rm_model": "m"},
        ),
        (
            {"rm_type": None, "custom_rm_path": "a.b", "rm_url": "http://a"},
            {"rm_type": None, "custom_rm_path": "a.b"},
        ),
    ],
    "whole_groups_go_to_a_function": [
        ({"group_rm": True}, {"group_rm": True, "rm_type": None, "custom_rm_path": "a.b"}),
    ],
    "reward_key_needs_a_dict": [
        ({"reward_key": "score"}, {"reward_key": "score", "rm_type": "remote_rm", "rm_url": "http://a"}),
        ({"reward_key": "score"}, {"reward_key": "score", "rm_type": None, "custom_rm_path": "a.b"}),
        ({"eval_reward_key": "acc"}, {"eval_reward_key": "acc", "rm_type": None, "custom_rm_path": "a.b"}),
    ],
    "evaluation_has_data_and_interval": [
        ({**EVAL, "eval_config": "sets.yaml"}, {"eval_config": "sets.yaml", "eval_interval": 5}),
        ({"eval_config": "sets.yaml"}, {"eval_config": "sets.yaml", "eval_interval": 1, "num_rollout": 0}),
        ({"eval_interval": 5}, EVAL),
        ({"eval_prompt_data": ("gsm8k", "test.jsonl")}, {**EVAL, "eval_interval": 1}),
    ],
    "evaluation_data_is_in_pairs": [
        ({**EVAL, "eval_prompt_data": ("test.jsonl",)}, EVAL),
        ({**EVAL, "eval_prompt_data": ("a.jsonl", "b.jsonl")}, {**EVAL, "eval_prompt_data": ("a", "b.jsonl")}),
        (
            {**EVAL, "eval_prompt_data": ("a", "x.jsonl", "a", "y.jsonl")},
            {**EVAL, "eval_prompt_data": ("a", "x.jsonl", "b", "y.jsonl")},
        ),
    ],
    "evaluation_needs_engines": [({**SFT, **EVAL}, {**EVAL, **REPLAY})],
    "kl_coefficient_needs_the_kl_loss": [
        ({"kl_loss_coef": 0.01}, {"kl_loss_coef": 0.01, "use_kl_loss": True}),
        ({"kl_loss_coef": 1e-9}, {"kl_loss_coef": 0.0, "use_kl_loss": True}),
    ],
    "sft_has_responses": [
        ({**SFT, "label_key": None}, {**SFT, "label_key": "response"}),
        ({**SFT, "label_key": None}, {**SFT, "label_key": None, "apply_chat_template": True}),
    ],
    "sft_takes_each_row_once": [({**SFT, "n_samples_per_prompt": 2}, SFT)],
    "sft_has_no_policy_terms": [
        ({**SFT, "use_rollout_logprobs": True}, {"use_rollout_logprobs": True}),
        ({**SFT, "use_kl_loss": True}, {"use_kl_loss": True}),
        ({**SFT, "entropy_coef": 0.1}, {"entropy_coef": 0.1}),
        ({**SFT, "eps_clip_c": 3.0}, {"eps_clip_c": 3.0}),
        ({**SFT, "kl_coef": 0.1}, {"kl_coef": 0.1}),
        ({**SFT, "normalize_advantages": True}, {"normalize_advantages": True}),
        ({**SFT, "overlong_buffer_len": 64}, {"overlong_buffer_len": 64}),
        ({**SFT, "use_opsm": True}, {"use_opsm": True}),
        ({**SFT, "use_tis": True}, {"use_tis": True}),
        ({**SFT, "use_rs": True}, {"use_rs": True}),
        ({**SFT, "use_opd": True, "opd_teacher_load": "t"}, {"use_opd": True, "opd_teacher_load": "t"}),
    ],
    "learning_rate_decays_downwards": [
        ({"lr_decay_style": "cosine", "min_lr": 2e-6}, {"lr_decay_style": "cosine", "min_lr": 1e-6}),
    ],
    "warmup_ends_before_the_decay": [
        (
            {"lr_decay_style": "linear", "lr_warmup_iters": 5, "lr_decay_iters": 5},
            {"lr_decay_style": "linear", "lr_warmup_iters": 4, "lr_decay_iters": 5},
        ),
        (
            {"lr_decay_style": "cosine", "lr_warmup_iters": 20, "num_steps_per_rollout": 2},
            {"lr_decay_style": "cosine", "lr_warmup_iters": 19, "num_steps_per_rollout": 2},
        ),
    ],
    "resumed_checkpoint_has_a_folder": [
        ({"ckpt_step": 3}, {"ckpt_step": 3, "load": "runs/a/checkpoints"}),
        ({"no_load_optim": True}, {"no_load_optim": True, "output_dir": "runs/a"}),
    ],
    "finetuning_has_weights": [
        ({"finetune": True}, {"finetune": True, "load": "runs/a/checkpoints"}),
        ({"finetune": True, "load": "c", "save": "c"}, {"finetune": True, "load": "c", "save": "d"}),
    ],
    "paths_have_only_the_step_placeholder": [
        ({"save_hf": "hf_{step}"}, {"save_hf": "hf_{rollout_id}"}),
        ({"load_debug_rollout_data": "d_{rollout_id:05d}"}, REPLAY),
        ({"save_debug_rollout_data": "d_{rollout_id}}"}, {"save_debug_rollout_data": "d_{rollout_id}"}),
    ],
    "dumps_do_not_overwrite_each_other": [
        ({"save_debug_rollout_data": "d"}, {"save_debug_rollout_data": "d", "num_rollout": 1}),
    ],
    "dump_and_replay_differ": [
        (
            {**REPLAY, "save_debug_rollout_data": "dump_{rollout_id}.jsonl"},
            {**REPLAY, "save_debug_rollout_data": "e_{rollout_id}"},
        ),
    ],
    "debug_modes_exclude_each_other": [
        ({"debug_rollout_only": True, "debug_train_only": True, **REPLAY}, {"debug_train_only": True, **REPLAY}),
    ],
    "training_only_has_a_rollout": [({"debug_train_only": True}, {"debug_train_only": True, **REPLAY})],
    "ids_that_end_a_response_are_heeded": [
        ({"rollout_ignore_eos": True, "rollout_stop_token_ids": (5,)}, {"rollout_ignore_eos": True}),
    ],
    "environment_is_made_of_strings": [
        ({"train_env_vars": {"NCCL_DEBUG": 1}}, {"train_env_vars": {"NCCL_DEBUG": "1"}}),
        ({"train_env_vars": {"NCCL-DEBUG": "1"}}, {"train_env_vars": {"_NCCL": ""}}),
        ({"train_env_vars": {"CUDA_VISIBLE_DEVICES": "1"}}, {"train_env_vars": {"CUDA_LAUNCH_BLOCKING": "1"}}),
    ],
    "profiled_steps_are_some": [
        (
            {"use_pytorch_profiler": True, "profile_step_start": 3, "profile_step_end": 3},
            {"use_pytorch_profiler": True, "profile_step_start": 3, "profile_step_end": 4},
        ),
    ],
    "profiled_steps_are_run": [
        ({"use_pytorch_profiler": True}, {"use_pytorch_profiler": True, "profile_step_start": 9}),
    ],
    "something_is_there_to_profile": [
        ({"train_env_vars": {"A": "1"}, "debug_rollout_only": True}, {"debug_rollout_only": True}),
    ],
    "profiled_ranks_exist": [
        (
            {"record_memory_history": True, "profile_ranks": (2,)},
            {"record_memory_history": True, "profile_ranks": (1,)},
        ),
    ],
    "memory_history_is_of_cuda": [
        ({"record_memory_history": True, "device": "cpu"}, {"record_memory_history": True}),
    ],
    "snapshots_are_taken": [
        ({"memory_snapshot_dir": "s"}, {"memory_snapshot_dir": "s", "record_memory_history": True}),
    ],
    "something_runs": [
        ({"debug_rollout_only": True, **REPLAY}, {"debug_rollout_only": True}),
        ({**SFT, "debug_rollout_only": True}, SFT),
    ],
}
"""Rule -> pairs of (fields that break it, fields that just do not), each on top of the valid configuration."""

EXAMPLES |= AGENT_EXAMPLES | ALGORITHM_EXAMPLES | CRITIC_EXAMPLES
EXAMPLES |= TRAINER_EXAMPLES | ASYNCHRONOUS_EXAMPLES | MEGATRON_EXAMPLES

NAMED_RULES = {rule.__name__: rule for rule in RULES}
PAIRS = [(name, bad, good) for name, pairs in EXAMPLES.items() for bad, good in pairs]
IDS = [f"{name}-{number}" for name, pairs in EXAMPLES.items() for number in range(len(pairs))]


def test_the_valid_configuration_is_valid(make_config: Make):
    assert check(make_config()) == []


def test_every_rule_has_examples():
    by_hand = {rule.__name__ for rule in CROSS_RULES} | {"prompts_per_rollout", "group_is_big_enough"}
    assert by_hand == EXAMPLES.keys()
    assert len(NAMED_RULES) == len(RULES), "two rules share a name"


@pytest.mark.parametrize(("name", "bad", "good"), PAIRS, ids=IDS)
def test_rule_finds_the_fault_and_accepts_the_near_miss(
    make_config: Make, name: str, bad: dict[str, Any], good: dict[str, Any]
):
    message = NAMED_RULES[name](make_config(**bad))
    assert message is not None
    assert message in check(make_config(**bad)), "check does not reach the rule"
    assert check(make_config(**good)) == []


@pytest.mark.parametrize(("name", "bad", "good"), PAIRS, ids=IDS)
def test_message_names_fields_and_flags_that_exist(make_config: Make, name: str, bad: dict[str, Any], good: object):
    message = NAMED_RULES[name](make_config(**bad)) or ""
    flags = re.findall(r"--([a-z][a-z0-9-]*)", message)
    assert flags, f"no remedy: {message}"
    for flag in flags:
        known = flag.replace("-", "_")
        assert find(known) or find_negated(known), f"--{flag} is no flag: {message}"
    fields = [word for word in re.findall(r"[a-z][a-z0-9_]+", message.replace("--", " ")) if find(word)]
    assert fields, f"no field is named: {message}"


def test_every_number_has_a_bound():
    bounded = {item.field for item in FIELD_RULES}
    for field in all_fields().values():
        if field.inner in (int, float) or field.inner == tuple[int, ...]:
            assert field.name in bounded, f"{field.name} may be any number: give it a Bound"


@pytest.mark.parametrize("bound", BOUNDS, ids=lambda bound: bound.field)
def test_bound_at_its_edges(make_config: Make, bound: Any):
    field = all_fields()[bound.field]
    step = 1e-9 if field.inner is float else 1
    lift = (lambda number: (number,)) if field.is_list else (lambda number: number)
    low = float(bound.low) if field.inner is float else int(bound.low)
    smallest, below = (low + step, low) if bound.low_open else (low, low - step)
    assert bound(make_config(**{bound.field: lift(smallest)})) is None
    message = bound(make_config(**{bound.field: lift(below)}))
    assert message is not None and message.startswith(f"{bound.field} = {below} must be ") and field.flag in message
    if bound.high != math.inf:
        largest, above = (bound.high - step, bound.high) if bound.high_open else (bound.high, bound.high + step)
        assert bound(make_config(**{bound.field: lift(largest)})) is None
        assert bound(make_config(**{bound.field: lift(above)})) is not None
    if field.inner is float:
        assert bound(make_config(**{bound.field: math.nan})) is not None
        assert bound(make_config(**{bound.field: math.inf})) is not None
    if field.is_optional:
        assert bound(make_config(**{bound.field: None})) is None


@pytest.mark.parametrize("value", [0, -2], ids=str)
def test_top_k_is_minus_one_or_positive(make_config: Make, value: int):
    assert check(make_config(rollout_top_k=-1)) == check(make_config(rollout_top_k=1)) == []
    assert any("rollout_top_k" in message for message in check(make_config(rollout_top_k=value)))


@pytest.mark.parametrize("name", ["save", "label_key", "custom_rm_path", "wandb_group", "input_key"])
def test_empty_strings_are_named(make_config: Make, name: str):
    fields = {name: "", **({"rm_type": None} if name == "custom_rm_path" else {})}
    assert any(message.startswith(f"{name} holds an empty string") for message in check(make_config(**fields)))


def test_empty_string_in_a_list_is_named(make_config: Make):
    assert any("rollout_stop" in message for message in check(make_config(rollout_stop=("###", ""))))


def test_all_violations_are_reported_at_once(make_config: Make):
    found = check(make_config(lr=-1.0, kl_loss_coef=0.1, global_batch_size=12, label_key=None, rm_timeout_s=0.0))
    for name in (
        "lr = -1.0",
        "kl_loss_coef = 0.1",
        "global_batch_size = 12",
        "label_key is unset",
        "rm_timeout_s = 0.0",
    ):
        assert sum(name in message for message in found) == 1, (name, found)
    assert len(found) == 5


def test_a_bad_number_silences_the_rules_that_compute_with_it(make_config: Make):
    found = check(make_config(global_batch_size=0, rollout_num_gpus_per_engine=0))
    assert len(found) == 2, found


def test_an_unreadable_field_is_not_judged(make_config: Make):
    cfg = make_config(n_samples_per_prompt=1, kl_loss_coef=0.1)
    found = check(cfg, unreadable=frozenset({"n_samples_per_prompt"}))
    assert len(found) == 1 and "kl_loss_coef" in found[0]


def test_a_mistake_in_a_rule_is_not_hidden(make_config: Make, monkeypatch: pytest.MonkeyPatch):
    def broken(cfg: RunConfig) -> str | None:
        return cfg.model.no_such_field  # pyright: ignore[reportAttributeAccessIssue]

    monkeypatch.setattr("rlkit.config.rules.CROSS_RULES", (broken,))
    with pytest.raises(AttributeError, match="no_such_field"):
        check(make_config(), unreadable=frozenset({"lr"}))


def test_rules_know_the_device_at_launch(make_config: Make):
    cfg = make_config(rollout_num_gpus_per_engine=2)
    assert check(cfg) == check_on(cfg, "cuda") == []
    (message,) = check_on(cfg, "cpu")
    assert "embedded engine" in message


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"gpu_type": "H10"}, "did you mean --gpu-type H100?"),
        ({"gpu_type": "T4"}, "--gpu-memory-gib"),
        ({"lr": float("inf")}, "lr = inf must be finite, and at least 0"),
        ({"rm_type": "nope"}, "the nearest is "),
    ],
    ids=["gpu", "unknown-gpu", "infinite", "grader"],
)
def test_what_is_nearly_right_is_named(make_config: Callable[..., RunConfig], fields: dict[str, Any], said: str):
    assert any(said in problem for problem in check(make_config(**fields)))
