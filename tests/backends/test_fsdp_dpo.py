"""DPO through the trainer: against the loss written out, and it learns."""

from pathlib import Path

import pytest
import torch
from fsdp_setup import (
    MIXED_LENGTHS,
    frozen_log_probs,
    make_config,
    make_samples,
    naive_log_probs,
    start_backend,
    train_step,
)
from transformers import AutoModelForCausalLM

LOSSES = {
    "sigmoid": {},
    "smoothed": {"dpo_label_smoothing": 0.1},
    "ipo": {"dpo_loss_type": "ipo"},
}


@pytest.mark.parametrize("max_tokens", [1, 64, 10_000])
@pytest.mark.parametrize("name", LOSSES)
def test_dpo_equals_the_loss_written_out(checkpoints: dict[str, Path], name: str, max_tokens: int):
    path, other = checkpoints["qwen3"], str(checkpoints["qwen3-other"])
    beta = 0.3
    cfg = make_config(
        path, loss_type="dpo_loss", dpo_beta=beta, ref_load=other, max_tokens_per_gpu=max_tokens, **LOSSES[name]
    )
    samples = make_samples(MIXED_LENGTHS)
    metrics = train_step(start_backend(cfg), cfg, samples=samples)

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    logps, _ = naive_log_probs(model, samples, 1.0, padded=False)
    refs = frozen_log_probs(other, cfg, samples, padded=False)
    ratios = []
    for sample, logp, ref in zip(samples, logps, refs, strict=True):
        mask = torch.tensor(sample.loss_mask, dtype=torch.bool)
        ratios.append((logp - ref)[mask].sum())
    margins = torch.stack([chosen - rejected for chosen, rejected in zip(ratios[::2], ratios[1::2], strict=True)])
    if name == "ipo":
        loss = (margins - 1 / (2 * beta)).square().mean()
    else:
        smoothing = cfg.dpo.dpo_label_smoothing
        right = torch.sigmoid(beta * margins)
        loss = -((1 - smoothing) * right.log() + smoothing * (1 - right).log()).mean()
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert metrics["train/loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert metrics["train/dpo_margin"] == pytest.approx(beta * margins.mean().item(), rel=1e-4)
    assert metrics["train/dpo_accuracy"] == pytest.approx((margins > 0).float().mean().item())
    rewards = [beta * torch.stack(ratios[start::2]).mean().item() for start in (0, 1)]
    found = [metrics["train/dpo_chosen_reward"], metrics["train/dpo_rejected_reward"]]
    assert found == pytest.approx(rewards, rel=1e-4)


def test_dpo_learns_which_is_better(checkpoints: dict[str, Path]):
    """From no preference at all: policy and reference begin as one model."""
    cfg = make_config(checkpoints["qwen3"], loss_type="dpo_loss", lr=1e-3)
    backend = start_backend(cfg)
    rows = [train_step(backend, cfg, 0) for _ in range(20)]
    assert rows[0]["train/loss"] == pytest.approx(0.6931472, abs=1e-5)
    assert rows[0]["train/dpo_accuracy"] == 0.0 and rows[0]["train/dpo_margin"] == 0.0
    assert rows[-1]["train/dpo_accuracy"] == 1.0 and rows[-1]["train/dpo_margin"] > 1.0
    assert rows[-1]["train/loss"] < 0.3
