"""Flags of algorithms through the whole loop: what must be scored before advantages exist, on two ranks."""

import pytest

pytestmark = pytest.mark.loop

TWO = ("--actor-num-gpus-per-node", 2, "--colocate")


def test_what_is_scored_before_the_advantages_reaches_the_loss(run_training, tiny_model):
    """Reference and teacher are the model itself, so the first step pays nothing to either, the second something."""
    run = run_training(
        *TWO,
        "--advantage-estimator", "reinforce_plus_plus", "--normalize-advantages", "--gamma", 0.99,
        "--kl-coef", 0.1, "--kl-loss-type", "k1", "--use-opd", "--opd-teacher-load", tiny_model,
        "--use-tis", "--use-rs", "--rs-level", "geometric", "--rs-veto-threshold", 1e-4,
        "--overlong-buffer-len", 4, "--num-steps-per-rollout", 2, "--num-rollout", 2, "--lr", 1e-2,
    )  # fmt: skip
    for name in ("kl_reward", "opd_reverse_kl"):
        first, second = run.series(f"train/{name}")
        assert abs(first) < 1e-6 < abs(second), name
    assert run.series("train/importance_weight") == pytest.approx([1.0, 1.0], abs=1e-3)
    assert run.series("train/importance_ess") == pytest.approx([1.0, 1.0], abs=1e-3)
    assert run.series("train/importance_reject_fraction") == [0.0, 0.0]
    assert all(-1.0 <= penalty <= 0.0 for penalty in run.series("rollout/overlong_penalty"))
    assert all(abs(kl) < 1e-6 for kl in run.series("train/first_ppo_kl"))
    assert all(norm > 1e-3 for norm in run.series("train/grad_norm"))
