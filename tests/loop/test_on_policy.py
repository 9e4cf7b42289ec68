"""--true-on-policy-mode: trainer and engine agree on every bit, and so does a run that was interrupted."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.loop

ONE = ("--actor-num-gpus-per-node", 1, "--colocate")
TWO = ("--actor-num-gpus-per-node", 2, "--rollout-num-gpus", 1)
GAPS = ("train/train_rollout_logprob_abs_diff", "train/train_rollout_logprob_abs_diff_max")


def test_no_token_has_two_log_probs(run_training):
    """Sequences longer than a tile of 64, a temperature, two optimizer steps, weights that move: exactly zero each
    time, where the same run without the mode shows rounding.
    """
    flags = ("--num-rollout", 4, "--rollout-max-response-len", 90, "--rollout-temperature", 0.8, "--lr", 1e-2)
    on_policy = run_training(*TWO, *flags, "--true-on-policy-mode", name="same")
    for gap in GAPS:
        assert on_policy.series(gap) == [0.0] * 4
    assert max(on_policy.series("rollout/response_length_max")) > 64
    assert min(on_policy.series("train/grad_norm")) > 0
    plain = run_training(*TWO, *flags, "--num-rollout", 1, name="plain")
    assert plain.series(GAPS[1])[0] > 0


@pytest.mark.slow
def test_an_interrupted_run_ends_with_the_same_bits(run_training):
    """Four steps at once, and two, a save, new processes and two more: every metric and every fingerprint."""
    flags = (*ONE, "--save-interval", 2, "--rollout-shuffle", "--true-on-policy-mode", "--use-kl-loss")
    whole = run_training(*flags, "--num-rollout", 4, name="whole")
    run_training(*flags, "--num-rollout", 2, name="parts")
    parts = run_training(*flags, "--num-rollout", 4, name="parts")
    names = ["rollout/reward", "train/loss", "train/grad_norm", "train/entropy", "train/kl_loss", *GAPS]
    for name in names:
        assert parts.series(name) == whole.series(name), name
    assert tensors(parts.directory) == tensors(whole.directory)


def tensors(directory: Path) -> dict[str, str]:
    from rlkit.orchestration.manifest import read_manifest

    manifest = read_manifest(directory / "checkpoints" / "iter_0000003")
    assert manifest is not None and len(manifest.tensors) > 20
    return dict(manifest.tensors)
