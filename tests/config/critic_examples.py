"""Examples of `rules/critic.py` and `rules/preferences.py` for `test_config_rules.py`."""

from typing import Any

PPO = {"advantage_estimator": "ppo"}
DPO = {"loss_type": "dpo_loss", "n_samples_per_prompt": 2, "label_key": None, "rm_type": None}

CRITIC_EXAMPLES: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    "critic_settings_have_a_critic": [
        ({name: value}, {**PPO, name: value})
        for name, value in {
            "critic_load": "m",
            "critic_save": "critic",
            "critic_lr": 1e-5,
            "critic_lr_warmup_iters": 2,
            "num_critic_only_steps": 2,
            "value_clip": 0.5,
            "lambd": 0.95,
        }.items()
    ],
    "policy_learns_after_the_critic": [
        ({**PPO, "num_critic_only_steps": 10}, {**PPO, "num_critic_only_steps": 9}),
    ],
    "critic_warmup_ends_before_the_decay": [
        (
            {**PPO, "lr_decay_style": "linear", "critic_lr_warmup_iters": 10},
            {**PPO, "lr_decay_style": "linear", "critic_lr_warmup_iters": 9},
        ),
        (
            {**PPO, "lr_decay_style": "linear", "lr_decay_iters": 5, "critic_lr_warmup_iters": 5},
            {**PPO, "lr_decay_style": "constant", "lr_decay_iters": 5, "critic_lr_warmup_iters": 5},
        ),
    ],
    "critic_computes_without_loss_scale": [({**PPO, "fp16": True}, PPO)],
    "critic_lives_with_its_ranks": [({**PPO, "fsdp_cpu_offload": True}, {"fsdp_cpu_offload": True})],
    "moving_modules_are_sharded": [
        ({**PPO, "train_backend": "megatron"}, {"train_backend": "megatron"}),
        (
            {"ref_update_interval": 2, "use_kl_loss": True, "train_backend": "megatron"},
            {"use_kl_loss": True, "train_backend": "megatron"},
        ),
    ],
    "exports_have_their_own_folders": [
        ({**PPO, "critic_save": "hf", "save_hf": "hf"}, {**PPO, "critic_save": "critic", "save_hf": "hf"}),
    ],
    "moving_reference_is_used": [
        ({"ref_update_interval": 2}, {"ref_update_interval": 2, "use_kl_loss": True}),
        (
            {"ref_update_interval": 2, "use_kl_loss": True, "lora_rank": 8},
            {"lora_rank": 8, "use_kl_loss": True, "ref_load": "other"},
        ),
    ],
    "preferences_come_in_pairs": [({**DPO, "n_samples_per_prompt": 4}, DPO)],
    "pairs_stay_together": [({**DPO, "global_batch_size": 1}, {**DPO, "global_batch_size": 8})],
    "pairs_are_weighed_alike": [
        ({**DPO, "calculate_per_token_loss": True}, DPO),
        ({**DPO, "loss_constant_length": 100}, DPO),
    ],
    "pairs_have_no_label": [({**DPO, "label_key": "label"}, DPO)],
    "pair_columns_differ": [
        ({**DPO, "chosen_key": "rejected"}, {**DPO, "chosen_key": "better"}),
        ({**DPO, "input_key": "chosen"}, {**DPO, "input_key": "prompt"}),
    ],
    "smoothing_is_of_the_sigmoid_loss": [
        (
            {**DPO, "dpo_loss_type": "ipo", "dpo_label_smoothing": 0.1},
            {**DPO, "dpo_loss_type": "sigmoid", "dpo_label_smoothing": 0.1},
        ),
    ],
    "pair_settings_have_pairs": [
        ({name: value}, {**DPO, name: value})
        for name, value in {
            "dpo_beta": 0.3,
            "dpo_loss_type": "ipo",
            "dpo_label_smoothing": 0.1,
            "chosen_key": "better",
            "rejected_key": "worse",
        }.items()
    ],
}
"""Rule -> pairs of (fields that break it, fields that just do not)."""
