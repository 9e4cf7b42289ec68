"""Packed, padded and one by one are the same computation: loss, gradient norm and weights after the step."""

from pathlib import Path

import pytest
import torch
from fsdp_setup import MIXED_LENGTHS, all_weights, make_config, make_samples, naive_step, start_backend, train_step

from rlkit.config.schema import RunConfig

OBJECTIVES = {
    "grpo": {},
    "grpo_per_token": {"calculate_per_token_loss": True},
    "entropy": {"entropy_coef": 0.05},
    "temperature": {"rollout_temperature": 0.7},
    "sft": {"loss_type": "sft_loss"},
}


def assert_equals_naive(cfg: RunConfig, path: Path, *, padded: bool) -> None:
    samples = make_samples(MIXED_LENGTHS)
    backend = start_backend(cfg)
    metrics = train_step(backend, cfg, samples=samples)
    expected = naive_step(path, cfg, samples, padded=padded)
    assert metrics["train/loss"] == pytest.approx(expected.loss, rel=1e-5, abs=1e-6)
    assert metrics["train/grad_norm"] == pytest.approx(expected.grad_norm, rel=1e-5)
    weights = all_weights(backend)
    assert weights.keys() == expected.weights.keys()
    for name, tensor in weights.items():
        # Adam's first step is lr * sign(gradient): where the gradient is rounding noise, so is the sign
        clear = expected.gradients[name].abs() > 1e-5
        assert clear.float().mean() > 0.8, name
        torch.testing.assert_close(tensor[clear], expected.weights[name][clear], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("padded", [False, True], ids=["one_by_one", "padded"])
def test_packed_equals_naive(checkpoints: dict[str, Path], objective: str, padded: bool):
    path = checkpoints["qwen3"]
    assert_equals_naive(make_config(path, **OBJECTIVES[objective]), path, padded=padded)


def test_packed_equals_naive_with_a_reference_model(checkpoints: dict[str, Path]):
    path, other = checkpoints["qwen3"], str(checkpoints["qwen3-other"])
    cfg = make_config(path, use_kl_loss=True, ref_load=other, kl_loss_coef=1e-3, kl_loss_type="k3", entropy_coef=0.01)
    assert_equals_naive(cfg, path, padded=False)


@pytest.mark.parametrize("name", ["qwen3-untied", "llama"])
def test_packed_equals_naive_for_other_architectures(checkpoints: dict[str, Path], name: str):
    assert_equals_naive(make_config(checkpoints[name]), checkpoints[name], padded=False)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_packed_equals_naive_for_other_attention(checkpoints: dict[str, Path], implementation: str):
    cfg = make_config(checkpoints["qwen3"], attn_implementation=implementation)
    assert_equals_naive(cfg, checkpoints["qwen3"], padded=False)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_tokens_per_gpu": 38},
        {"max_tokens_per_gpu": 1},
        {"max_tokens_per_gpu": 10_000},
        {"log_probs_chunk_size": 1},
        {"gradient_checkpointing": True},
    ],
    ids=["small_micro_batches", "one_sample_each", "one_micro_batch", "one_row_chunks", "gradient_checkpointing"],
)
def test_memory_settings_do_not_change_the_step(checkpoints: dict[str, Path], changes: dict[str, object]):
    path = checkpoints["qwen3"]
    results = []
    for cfg in (make_config(path, entropy_coef=0.1), make_config(path, entropy_coef=0.1, **changes)):
        backend = start_backend(cfg)
        results.append((train_step(backend, cfg), all_weights(backend)))
    (metrics, weights), (other_metrics, other_weights) = results
    for name in ("loss", "grad_norm", "entropy", "pg_loss", "clip_fraction", "train_rollout_logprob_abs_diff"):
        assert other_metrics[f"train/{name}"] == pytest.approx(metrics[f"train/{name}"], rel=1e-5, abs=1e-7), name
    for name, tensor in weights.items():
        close = (tensor - other_weights[name]).abs() < 1e-4
        assert close.float().mean() > 0.99, name


def test_gradient_checkpointing_keeps_less_for_the_backward_pass(checkpoints: dict[str, Path]):
    saved_bytes = []
    for enabled in (False, True):
        cfg = make_config(checkpoints["qwen3"], gradient_checkpointing=enabled)
        backend = start_backend(cfg)
        total = 0

        def count(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal total
            total += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            train_step(backend, cfg)
        saved_bytes.append(total)
    assert saved_bytes[1] < 0.6 * saved_bytes[0]
