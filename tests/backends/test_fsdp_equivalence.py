"""Packed, padded and one by one are the same computation: loss, gradient norm and weights after the step."""

from pathlib import Path

import pytest
import torch
from fsdp_setup import (
    MIXED_LENGTHS,
    all_weights,
    make_config,
    make_samples,
    make_uneven_samples,
    naive_log_probs,
    naive_step,
    start_backend,
    train_step,
)
from transformers import AutoModelForCausalLM

from rlkit.config.schema import RunConfig
from rlkit.types.samples import Sample

OBJECTIVES = {
    "grpo": {},
    "grpo_per_token": {"calculate_per_token_loss": True},
    "entropy": {"entropy_coef": 0.05},
    "temperature": {"rollout_temperature": 0.7},
    "sft": {"loss_type": "sft_loss"},
}

BAND = {"tis_clip_low": 0.3, "tis_clip": 3.0}
ALGORITHMS: dict[str, dict[str, object]] = {
    "gspo": {"advantage_estimator": "gspo", "use_rollout_logprobs": True, "eps_clip": 0.4},
    "cispo": {"advantage_estimator": "cispo", "use_rollout_logprobs": True, "eps_clip": 1.0, "eps_clip_high": 1.0},
    "clip": {"use_rollout_logprobs": True, "eps_clip": 0.4, "eps_clip_high": 0.8, "calculate_per_token_loss": True},
    "dr_grpo": {"disable_grpo_std_normalization": True, "loss_constant_length": 32},
    "rloo": {"advantage_estimator": "rloo"},
    "reinforce": {
        "advantage_estimator": "reinforce_plus_plus",
        "normalize_advantages": True,
        "kl_coef": 0.05,
        "kl_loss_type": "k1",
        "gamma": 0.95,
    },
    "baseline": {"advantage_estimator": "reinforce_plus_plus_baseline", "normalize_advantages": True},
    "tis": {"use_tis": True, **BAND},
    "tis_sequence": {"use_tis": True, "tis_level": "geometric", "tis_batch_normalize": True, **BAND},
    "icepop": {"use_tis": True, "tis_mode": "mask", **BAND},
    "icepop_per_token": {"use_tis": True, "tis_mode": "mask", "calculate_per_token_loss": True, **BAND},
    "mis": {
        "use_tis": True,
        "use_rs": True,
        "rs_level": "geometric",
        "rs_lower_bound": 0.2,
        "rs_upper_bound": 4.0,
        "rs_veto_threshold": 1e-3,
        **BAND,
    },
    "unbiased_kl": {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3", "use_unbiased_kl": True},
}


def assert_equals_naive(
    cfg: RunConfig, path: Path, *, padded: bool, samples: list[Sample] | None = None
) -> dict[str, float]:
    samples = samples or make_samples(MIXED_LENGTHS)
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
    return metrics


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("padded", [False, True], ids=["one_by_one", "padded"])
def test_packed_equals_naive(checkpoints: dict[str, Path], objective: str, padded: bool):
    path = checkpoints["qwen3"]
    assert_equals_naive(make_config(path, **OBJECTIVES[objective]), path, padded=padded)


def test_packed_equals_naive_with_a_reference_model(checkpoints: dict[str, Path]):
    path, other = checkpoints["qwen3"], str(checkpoints["qwen3-other"])
    cfg = make_config(path, use_kl_loss=True, ref_load=other, kl_loss_coef=1e-3, kl_loss_type="k3", entropy_coef=0.01)
    assert_equals_naive(cfg, path, padded=False)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_equals_naive(checkpoints: dict[str, Path], name: str):
    """On groups of unequal size, single tokens and a masked sample."""
    path, other = checkpoints["qwen3"], str(checkpoints["qwen3-other"])
    changes = dict(ALGORITHMS[name])
    cfg = make_config(path, **changes)
    if cfg.needs_reference:
        cfg = make_config(path, ref_load=other, **changes)
    metrics = assert_equals_naive(cfg, path, padded=False, samples=engine_samples(path))
    if cfg.mismatch.use_tis:
        assert 0.0 < metrics["train/importance_ess"] < 1.0
    if cfg.mismatch.tis_mode == "mask" or cfg.mismatch.use_rs:
        assert 0.0 < metrics["train/importance_reject_fraction"] < 0.9


def test_distillation_equals_naive(checkpoints: dict[str, Path]):
    path, teacher = checkpoints["qwen3"], str(checkpoints["qwen3-untied"])
    cfg = make_config(path, use_opd=True, opd_teacher_load=teacher, opd_kl_coef=0.5)
    metrics = assert_equals_naive(cfg, path, padded=False, samples=engine_samples(path))
    assert abs(metrics["train/opd_reverse_kl"]) > 0.1


def engine_samples(path: Path) -> list[Sample]:
    """Uneven samples whose engine disagrees with the trainer by up to a factor of e, and here and there by far more."""
    samples = make_uneven_samples()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        logps, _ = naive_log_probs(model, samples, 1.0, padded=False)
    generator = torch.Generator().manual_seed(5)
    for sample, logp in zip(samples, logps, strict=True):
        noise = torch.randn(logp.shape, generator=generator)
        sample.rollout_logprobs = (logp + 0.5 * noise + 2.0 * (noise > 1.5)).tolist()
    samples[5].rollout_logprobs[3] += 9.0  # below any veto
    samples[5].loss_mask[3] = 1
    return samples


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
