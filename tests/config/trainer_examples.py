"""Examples of `rules/schedules.py` and `rules/fsdp.py` for `test_config_rules.py`."""

from typing import Any

ON_POLICY = {"true_on_policy_mode": True}
LORA = {"lora_rank": 8}
WSD = {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 3}

TRAINER_EXAMPLES: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    "warmup_rises": [
        ({"lr_warmup_iters": 2, "lr_warmup_init": 1e-5}, {"lr_warmup_iters": 2, "lr_warmup_init": 1e-7}),
    ],
    "warmup_is_given_once": [
        ({"lr_warmup_iters": 2, "lr_warmup_fraction": 0.1}, {"lr_warmup_fraction": 0.1}),
    ],
    "warmup_init_has_a_warmup": [
        ({"lr_warmup_init": 1e-7}, {"lr_warmup_init": 1e-7, "lr_warmup_fraction": 0.5}),
    ],
    "wsd_decay_has_a_length": [
        ({"lr_decay_style": "WSD"}, WSD),
        (
            {**WSD, "lr_wsd_decay_iters": 10, "lr_warmup_iters": 1},
            {**WSD, "lr_wsd_decay_iters": 9, "lr_warmup_iters": 1},
        ),
        ({"lr_wsd_decay_iters": 3}, WSD),
        ({"lr_wsd_decay_style": "cosine", "lr_decay_style": "cosine"}, {**WSD, "lr_wsd_decay_style": "cosine"}),
    ],
    "trained_parameters_are_named_once": [
        (
            {"only_train_params_name_list": ("mlp",), "freeze_params_name_list": ("norm",)},
            {"only_train_params_name_list": ("mlp",)},
        ),
    ],
    "parameter_names_are_patterns": [
        ({"freeze_params_name_list": ("layers.[0",)}, {"freeze_params_name_list": ("layers.[01]",)}),
        ({"only_train_params_name_list": ("(mlp",)}, {"only_train_params_name_list": ("(mlp)",)}),
    ],
    "other_backends_have_no_fsdp": [
        ({"train_backend": "megatron", "lora_rank": 8}, {"train_backend": "megatron"}),
        ({"train_backend": "megatron", "fsdp_state_dict_cpu_offload": False}, {"fsdp_state_dict_cpu_offload": False}),
    ],
    "copies_split_the_ranks": [
        (
            {"actor_num_gpus_per_node": 4, "fsdp_replicate_size": 3},
            {"actor_num_gpus_per_node": 4, "fsdp_replicate_size": 2},
        ),
        (
            {"actor_num_gpus_per_node": 4, "fsdp_replicate_size": 4, "context_parallel_size": 2},
            {"actor_num_gpus_per_node": 4, "fsdp_replicate_size": 2, "context_parallel_size": 2},
        ),
    ],
    "async_saves_copy_to_the_host": [
        ({"async_save": True, "fsdp_state_dict_cpu_offload": False}, {"fsdp_state_dict_cpu_offload": False}),
    ],
    "adapters_are_switched_on": [
        ({"lora_alpha": 32.0}, {**LORA, "lora_alpha": 32.0}),
        ({"lora_target_modules": ("q_proj",)}, {**LORA, "lora_target_modules": ("q_proj",)}),
    ],
    "adapters_are_what_is_trained": [
        ({**LORA, "freeze_params_name_list": ("norm",)}, LORA),
    ],
    "adapters_have_targets": [
        (
            {**LORA, "lora_target_modules": ("all-linear", "q_proj")},
            {**LORA, "lora_target_modules": ("q_proj", "v_proj")},
        ),
        ({**LORA, "lora_target_modules": ("lm_head",)}, {**LORA, "lora_target_modules": ("o_proj",)}),
        ({**LORA, "lora_target_modules": ()}, {**LORA, "lora_target_modules": ("all-linear",)}),
    ],
    "loss_scale_needs_fp16": [
        ({"loss_scale": 8.0}, {"fp16": True, "loss_scale": 8.0}),
        ({"fp16": True, "dtype": "bfloat16"}, {"fp16": True}),
        ({"fp16": True, "loss_scale": 8.0, "hysteresis": 1}, {"fp16": True, "hysteresis": 1}),
        ({"fp16": True, "min_loss_scale": 2.0e5}, {"fp16": True, "min_loss_scale": 4.0}),
    ],
    "on_policy_mode_computes_in_one_way": [
        ({**ON_POLICY, "device": "cuda"}, {**ON_POLICY, "device": "cpu"}),
        ({**ON_POLICY, "rollout_engine": "sglang"}, {**ON_POLICY, "rollout_engine": "embedded"}),
        ({**ON_POLICY, "dtype": "bfloat16"}, {**ON_POLICY, "dtype": "float32"}),
        ({**ON_POLICY, **LORA}, {**ON_POLICY, "gradient_checkpointing": True}),
        ({**ON_POLICY, "attn_implementation": "sdpa"}, {"attn_implementation": "sdpa"}),
    ],
}
