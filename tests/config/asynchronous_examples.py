"""Examples of `rules/asynchronous.py` for `test_config_rules.py`."""

from typing import Any

SPLIT = {"colocate": False, "rollout_num_gpus": 2}
ONE_STEP = {**SPLIT, "async_mode": "one-step"}
FULL = {**SPLIT, "async_mode": "full"}
DOWNWEIGHT = {**FULL, "stale_groups": "downweight"}
SFT = {"loss_type": "sft_loss", "n_samples_per_prompt": 1, "rm_type": None}
WHITENED = {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True}

ASYNCHRONOUS_EXAMPLES: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    "asynchronous_sides_have_their_own_gpus": [
        ({"async_mode": "one-step"}, ONE_STEP),
        ({"async_mode": "full"}, FULL),
    ],
    "asynchronous_runs_generate_and_train": [
        ({**ONE_STEP, "debug_rollout_only": True}, ONE_STEP),
        ({**FULL, "load_debug_rollout_data": "dump_{rollout_id}.jsonl"}, FULL),
        ({**FULL, "load_debug_rollout_data": "dump_{rollout_id}.jsonl", "debug_train_only": True}, FULL),
        ({**FULL, **SFT}, {**SPLIT, **SFT}),
    ],
    "staleness_flags_have_their_mode": [
        ({**ONE_STEP, "max_staleness": 1}, {**FULL, "max_staleness": 1}),
        ({**SPLIT, "stale_groups": "drop"}, {**FULL, "stale_groups": "drop"}),
        ({**ONE_STEP, "staleness_decay": 0.9}, {**DOWNWEIGHT, "staleness_decay": 0.9}),
    ],
    "decay_needs_weights": [
        ({**FULL, "staleness_decay": 0.9}, {**DOWNWEIGHT, "staleness_decay": 0.9}),
    ],
    "weights_survive_whitening": [
        ({**DOWNWEIGHT, **WHITENED}, {**FULL, **WHITENED}),
        ({**DOWNWEIGHT, "advantage_estimator": "ppo"}, {**DOWNWEIGHT, "advantage_estimator": "rloo"}),
    ],
    "updates_come_before_groups_are_stale": [
        (
            {**FULL, "max_staleness": 1, "update_weights_interval": 3},
            {**FULL, "max_staleness": 2, "update_weights_interval": 3},
        ),
    ],
    "generation_without_steps_has_no_step_functions": [
        ({**FULL, "rollout_function_path": "a.b"}, {**ONE_STEP, "rollout_function_path": "a.b"}),
        ({**FULL, "over_sampling_batch_size": 8}, {**ONE_STEP, "over_sampling_batch_size": 8}),
        (
            {**FULL, "partial_rollout": True, "dynamic_sampling_filter_path": "check_reward_nonzero_std"},
            {**FULL, "dynamic_sampling_filter_path": "check_reward_nonzero_std"},
        ),
        (
            {**FULL, "buffer_filter_path": "pop_first", "dynamic_sampling_filter_path": "check_reward_nonzero_std"},
            {**FULL, "rollout_sample_filter_path": "a.b"},
        ),
    ],
}
