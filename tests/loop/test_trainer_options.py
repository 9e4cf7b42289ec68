"""The whole loop with adapters, in half precision, and continued by another number of ranks."""

import shutil
from pathlib import Path

import pytest

from rlkit.observability.audit import audit
from rlkit.observability.ledger import read_ledger

pytestmark = pytest.mark.loop

ONE = ("--actor-num-gpus-per-node", 1, "--colocate")
TWO = ("--actor-num-gpus-per-node", 2, "--colocate", "--rollout-num-gpus", 1)


@pytest.fixture
def spread_model(tiny_model, tmp_path) -> Path:
    """The tiny model with embeddings eight times as large: its tied head is frozen under adapters, and as it comes it
    cannot tell tokens apart by more than one nat.
    """
    from safetensors.torch import load_file, save_file

    path = tmp_path / "spread_model"
    shutil.copytree(tiny_model, path)
    tensors = load_file(path / "model.safetensors")
    tensors["model.embed_tokens.weight"] *= 8.0
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.slow
def test_adapters_learn_and_engines_get_them_merged(run_training, spread_model, task):
    """Reward rises; after every update the engine's weights are the trainer's merged ones, byte for byte, and both
    score alike; the KL is to the base model, which is loaded once.
    """
    run = run_training(
        *ONE,
        "--hf-checkpoint", spread_model, "--num-rollout", 16, "--lr", 2e-2, "--lora-rank", 8, "--use-kl-loss",
        "--kl-loss-coef", 0.001, "--lr-decay-style", "WSD", "--lr-wsd-decay-iters", 4, "--lr-warmup-iters", 2,
        "--check-weight-update-equal", "--save-interval", 16, "--save-hf", task / "lora-{rollout_id}",
    )  # fmt: skip
    reward = run.series("rollout/reward")
    assert sum(reward[-3:]) / 3 > sum(reward[:3]) / 3 + 0.2
    assert max(run.series("train/train_rollout_logprob_abs_diff")) < 1e-4
    assert run.series("train/kl_loss")[0] == 0.0 and run.series("train/kl_loss")[-1] > 0.01
    rates = run.series("train/lr")
    assert rates[0] == pytest.approx(1e-2) and rates[5] == 2e-2 and rates[-1] < 5e-3

    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    merged = AutoModelForCausalLM.from_pretrained(task / "lora-15")
    base = AutoModelForCausalLM.from_pretrained(spread_model)
    tokens = torch.arange(3, 20)[None]
    with torch.no_grad():
        adapted = PeftModel.from_pretrained(base, str(task / "lora-15" / "adapter"))(tokens).logits
        torch.testing.assert_close(adapted, merged(tokens).logits, atol=1e-3, rtol=0)


@pytest.mark.slow
def test_another_number_of_ranks_goes_on_with_the_same_data(run_training):
    """Two ranks save after two steps, one goes on: the numbers of four steps by two ranks, and every prompt once."""
    flags = ("--save-interval", 2, "--rollout-shuffle", "--fsdp-full-params")
    whole = run_training(*TWO, *flags, "--num-rollout", 4, name="whole")
    run_training(*TWO, *flags, "--num-rollout", 2, name="parts")
    parts = run_training(*ONE, *flags, "--num-rollout", 4, name="parts")
    for metric in ("rollout/reward", "train/loss", "train/grad_norm"):
        assert parts.series(metric) == pytest.approx(whole.series(metric), rel=1e-2, abs=1e-5), metric
    assert parts.series("rollout/reward")[:3] == whole.series("rollout/reward")[:3]
    ledger = audit(read_ledger(parts.directory / "ledger.jsonl"))
    assert (ledger.problems, ledger.retrained, ledger.num_trained) == ([], [], 32)


@pytest.mark.slow
def test_float16_trains_and_generates(run_training):
    run = run_training(*ONE, "--num-rollout", 2, "--fp16", "--check-weight-update-equal")
    assert run.series("train/loss_scale") == [65536.0, 65536.0]
    assert max(run.series("train/train_rollout_logprob_abs_diff")) < 0.02
