"""Examples of `rules/algorithms.py` for `test_config_rules.py`."""

from typing import Any

ALGORITHM_EXAMPLES: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    "reinforce_is_whitened": [
        ({"advantage_estimator": name}, {"advantage_estimator": name, "normalize_advantages": True})
        for name in ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
    ],
    "gamma_discounts_rewards": [
        (
            {"gamma": 0.99, "advantage_estimator": "reinforce_plus_plus_baseline", "normalize_advantages": True},
            {"gamma": 0.99, "advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True},
        ),
        ({"gamma": 0.99}, {"gamma": 1.0}),
        ({"gamma": 0.99, "advantage_estimator": "gspo"}, {"gamma": 0.99, "advantage_estimator": "ppo"}),
    ],
    "kl_is_in_one_place": [
        (
            {"kl_coef": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.1},
            {"kl_coef": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.0},
        ),
    ],
    "unbiased_kl_needs_the_kl_loss": [
        ({"use_unbiased_kl": True}, {"use_unbiased_kl": True, "use_kl_loss": True}),
        ({"use_unbiased_kl": True, "kl_coef": 0.1}, {"kl_coef": 0.1}),
    ],
    "one_denominator_is_chosen": [
        ({"loss_constant_length": 100, "calculate_per_token_loss": True}, {"loss_constant_length": 100}),
    ],
    "sequence_ratios_weigh_samples_alike": [
        (
            {"advantage_estimator": "gspo", "calculate_per_token_loss": True},
            {"advantage_estimator": "cispo", "calculate_per_token_loss": True},
        ),
        ({"advantage_estimator": "gspo", "loss_constant_length": 100}, {"advantage_estimator": "gspo"}),
    ],
    "cispo_has_no_dual_clip": [
        ({"advantage_estimator": "cispo", "eps_clip_c": 3.0}, {"advantage_estimator": "gspo", "eps_clip_c": 3.0}),
    ],
    "overlong_buffer_fits": [({"overlong_buffer_len": 1025}, {"overlong_buffer_len": 1024})],
    "weights_need_two_log_probs": [
        ({"use_tis": True, "use_rollout_logprobs": True}, {"use_tis": True}),
        ({"use_rs": True, "use_rollout_logprobs": True}, {"use_rs": True}),
    ],
    "bands_hold_one": [
        ({"use_tis": True, "tis_clip": 0.9}, {"use_tis": True, "tis_clip": 1.0}),
        ({"use_tis": True, "tis_clip": 2.0, "tis_clip_low": 3.0}, {"use_tis": True, "tis_clip_low": 1.0}),
        ({"use_tis": True, "tis_clip": 1.0, "tis_clip_low": 1.0}, {"use_tis": True, "tis_clip": 1.1}),
        ({"use_rs": True, "rs_lower_bound": 2.5}, {"use_rs": True, "rs_upper_bound": 1.5}),
    ],
    "truncation_is_from_above": [
        (
            {"use_tis": True, "tis_mode": "truncate", "tis_clip_low": 0.5},
            {"use_tis": True, "tis_mode": "clip", "tis_clip_low": 0.5},
        ),
    ],
    "veto_is_below_the_band": [
        ({"use_rs": True, "rs_veto_threshold": 1.0}, {"use_rs": True, "rs_veto_threshold": 1e-4}),
    ],
    "corrections_are_switched_on": [
        ({"tis_clip": 3.0}, {"tis_clip": 3.0, "use_tis": True}),
        ({"tis_clip_low": 0.5}, {"tis_clip_low": 0.5, "use_tis": True}),
        ({"tis_level": "sequence"}, {"tis_level": "sequence", "use_tis": True}),
        ({"tis_mode": "mask"}, {"tis_mode": "mask", "use_tis": True}),
        ({"tis_batch_normalize": True}, {"tis_batch_normalize": True, "use_tis": True}),
        ({"rs_level": "geometric"}, {"rs_level": "geometric", "use_rs": True}),
        ({"rs_lower_bound": 0.9}, {"rs_lower_bound": 0.9, "use_rs": True}),
        ({"rs_upper_bound": 1.1}, {"rs_upper_bound": 1.1, "use_rs": True}),
        ({"rs_veto_threshold": 1e-4}, {"rs_veto_threshold": 1e-4, "use_rs": True}),
        ({"opd_teacher_load": "t"}, {"opd_teacher_load": "t", "use_opd": True}),
        ({"opd_kl_coef": 0.5}, {"opd_kl_coef": 0.5, "opd_teacher_load": "t", "use_opd": True}),
        ({"opsm_delta": 0.1}, {"opsm_delta": 0.1, "use_opsm": True}),
        ({"overlong_penalty_factor": 0.5}, {"overlong_penalty_factor": 0.5, "overlong_buffer_len": 128}),
    ],
    "teacher_is_named": [({"use_opd": True}, {"use_opd": True, "opd_teacher_load": "t"})],
}
"""Rule -> pairs of (fields that break it, fields that just do not)."""
