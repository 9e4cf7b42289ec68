import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fsdp_setup import (
    MIXED_LENGTHS,
    all_weights,
    make_config,
    make_samples,
    make_updates,
    naive_log_probs,
    parts_of,
    rank_info,
    save_checkpoint_dir,
    start_backend,
    train_step,
)
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from rlkit.backends.fsdp.backend import FsdpBackend
from rlkit.backends.fsdp.trainer import micro_batch
from rlkit.types.errors import ConfigError, TrainError

POLICY_METRICS = {
    "train/loss",
    "train/pg_loss",
    "train/ppo_kl",
    "train/entropy",
    "train/clip_fraction",
    "train/train_rollout_logprob_abs_diff",
    "train/train_rollout_logprob_abs_diff_max",
    "train/mismatch_k1",
    "train/mismatch_k3",
    "train/grad_norm",
    "train/lr",
    "train/num_tokens",
    "train/num_optimizer_steps",
    "time/train_s",
    "memory/train_peak_gib",
}


def test_the_first_optimizer_step_has_ratio_one(checkpoints: dict[str, Path]):
    cfg = make_config(checkpoints["qwen3"], use_kl_loss=True, kl_loss_coef=0.1)
    metrics = train_step(start_backend(cfg), cfg)
    assert metrics.keys() == POLICY_METRICS | {"train/kl_loss", "time/log_prob_s"}
    assert metrics["train/ppo_kl"] == 0.0
    assert metrics["train/clip_fraction"] == 0.0
    assert metrics["train/kl_loss"] == 0.0
    assert metrics["train/lr"] == cfg.optimizer.lr
    assert metrics["train/num_tokens"] == sum(sum(s.loss_mask) for s in make_samples(MIXED_LENGTHS))


def test_scoring_leaves_the_model_sharded(checkpoints: dict[str, Path]):
    cfg = make_config(checkpoints["qwen3"])
    backend = start_backend(cfg)
    parts = parts_of(backend)
    (update,) = make_updates(make_samples(MIXED_LENGTHS), cfg)[0]
    scored = parts.trainer.score(parts.policy, [micro_batch(batch, parts.mesh) for batch in update.micro_batches])
    assert [len(logp_T) for logp_T in scored] == [batch.num_tokens for batch in update.micro_batches]
    assert all(isinstance(parameter, DTensor) for parameter in parts.policy.parameters())


def test_old_log_probs_are_those_from_before_the_first_step(checkpoints: dict[str, Path]):
    """Two optimizer steps a rollout: the second compares with the weights that the rollout began with."""
    cfg = make_config(checkpoints["qwen3"], num_steps_per_rollout=2)
    samples = make_samples(MIXED_LENGTHS)
    backend = start_backend(cfg)
    metrics = train_step(backend, cfg, samples=samples)
    assert metrics["train/first_ppo_kl"] == 0.0
    assert metrics["train/num_optimizer_steps"] == 2
    mask = torch.tensor([m for sample in samples[4:] for m in sample.loss_mask], dtype=torch.bool)

    def second_half(path: Path | None, weights: dict[str, torch.Tensor] | None) -> torch.Tensor:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        if weights is not None:
            model.load_state_dict(weights, strict=False)
        with torch.no_grad():
            return torch.cat(naive_log_probs(model, samples[4:], 1.0, padded=False)[0])[mask]

    one_step = start_backend(cfg)
    one_step.train(0, make_updates(samples, cfg)[0][:1])
    old = second_half(checkpoints["qwen3"], None)
    new = second_half(checkpoints["qwen3"], all_weights(one_step))
    total = sum(sum(sample.loss_mask) for sample in samples)
    assert metrics["train/ppo_kl"] == pytest.approx(((old - new).sum() / total).item(), rel=1e-3)
    ratio = (new - old).exp()
    advantages = torch.cat([a.repeat_interleave(n) for a, n in advantages_and_lengths(samples, cfg)])[mask]
    bounded = -ratio.clamp(0.8, 1.2) * advantages > -ratio * advantages
    assert metrics["train/clip_fraction"] == pytest.approx((bounded.sum() / total).item(), abs=1e-6)


def advantages_and_lengths(samples, cfg):
    batches = make_updates(samples, cfg)[0][1].micro_batches
    by_id = {i: a for b in batches for i, a in zip(b.sample_ids_S.tolist(), b.advantages_S, strict=True)}
    return [(by_id[i], torch.tensor(samples[i].response_length)) for i in range(4, 8)]


def test_the_gap_to_the_engine_is_measured(checkpoints: dict[str, Path]):
    cfg = make_config(checkpoints["qwen3"])
    samples = make_samples(MIXED_LENGTHS)
    model = AutoModelForCausalLM.from_pretrained(checkpoints["qwen3"])
    with torch.no_grad():
        logps, _ = naive_log_probs(model, samples, 1.0, padded=False)
    for number, (sample, logp) in enumerate(zip(samples, logps, strict=True)):
        sample.rollout_logprobs = (logp + (0.5 if number == 3 else 0.25)).tolist()
    metrics = train_step(start_backend(cfg), cfg, samples=samples)
    counts = [sum(sample.loss_mask) for sample in samples]
    expected = (0.25 * (sum(counts) - counts[3]) + 0.5 * counts[3]) / sum(counts)
    assert metrics["train/train_rollout_logprob_abs_diff"] == pytest.approx(expected, rel=1e-4)
    assert metrics["train/train_rollout_logprob_abs_diff_max"] == pytest.approx(0.5, rel=1e-4)


def test_rollout_log_probs_can_be_the_old_ones(checkpoints: dict[str, Path]):
    cfg = make_config(checkpoints["qwen3"], use_rollout_logprobs=True, num_steps_per_rollout=2)
    samples = make_samples(MIXED_LENGTHS)
    metrics = train_step(start_backend(cfg), cfg, samples=samples)
    assert "time/log_prob_s" not in metrics, "nothing needs scoring"
    assert metrics["train/first_ppo_kl"] > 0.01
    assert metrics["train/train_rollout_logprob_abs_diff"] > 0.01


def test_sft_reports_what_it_has(checkpoints: dict[str, Path]):
    cfg = make_config(checkpoints["qwen3"], loss_type="sft_loss")
    samples = [replace(sample, reward=None, rollout_logprobs=[]) for sample in make_samples(MIXED_LENGTHS)]
    backend = start_backend(cfg)
    losses = [train_step(backend, cfg, samples=samples)["train/loss"] for _ in range(6)]
    assert losses[-1] < 0.7 * losses[0]
    metrics = train_step(backend, cfg, samples=samples)
    assert {name for name in metrics if name.startswith("train/")} == {
        f"train/{name}" for name in ("loss", "entropy", "grad_norm", "lr", "num_tokens", "num_optimizer_steps")
    }


def test_training_raises_the_log_prob_of_good_samples(checkpoints: dict[str, Path]):
    cfg = make_config(checkpoints["qwen3"])
    samples = make_samples(MIXED_LENGTHS)
    for sample in samples:
        sample.reward = float(sample.index)
    backend = start_backend(cfg)

    def preference() -> float:
        model = AutoModelForCausalLM.from_pretrained(checkpoints["qwen3"])
        model.load_state_dict(all_weights(backend), strict=False)
        with torch.no_grad():
            logps, _ = naive_log_probs(model, samples, 1.0, padded=False)
        return sum(logp.mean().item() * (2 * s.index - 1) for logp, s in zip(logps, samples, strict=True))

    before = preference()
    for step in range(4):
        train_step(backend, cfg, step, samples=samples)
    assert preference() > before + 1.0


@pytest.mark.parametrize("poison", ["advantage", "weights"])
def test_a_loss_that_is_not_finite_stops_the_run_and_spares_the_weights(checkpoints: dict[str, Path], poison: str):
    cfg = make_config(checkpoints["qwen3"])
    backend = start_backend(cfg)
    updates = make_updates(make_samples(MIXED_LENGTHS), cfg)[0]
    if poison == "advantage":
        updates[0].micro_batches[0].advantages_S[0] = math.inf
    else:
        with torch.no_grad():
            next(iter(parts_of(backend).policy.parameters())).mul_(math.nan)
    before = all_weights(backend)
    with pytest.raises(TrainError, match=r"step 5, optimizer step 0: loss .*(nan|inf).*not finite"):
        backend.train(5, updates)
    after = all_weights(backend)
    assert all(torch.equal(before[name].nan_to_num(1.5), after[name].nan_to_num(1.5)) for name in before)


def test_a_sample_beyond_the_models_positions_is_refused(checkpoints: dict[str, Path]):
    cfg = make_config(checkpoints["qwen3"])
    backend = start_backend(cfg)
    train_step(backend, cfg, samples=make_samples([(28, 100)] * 8))
    with pytest.raises(TrainError, match=r"a sample of 129 tokens exceeds .*max_position_embeddings = 128"):
        train_step(backend, cfg, samples=make_samples([(29, 100)] * 8))


def test_steps_without_anything_to_train_change_nothing(checkpoints: dict[str, Path], caplog: pytest.LogCaptureFixture):
    cfg = make_config(checkpoints["qwen3"], num_steps_per_rollout=2)
    samples = make_samples(MIXED_LENGTHS)
    unscored = [replace(sample, reward=None) for sample in samples]
    backend = start_backend(cfg)
    before = all_weights(backend)
    metrics = train_step(backend, cfg, samples=unscored)
    assert metrics["train/num_optimizer_steps"] == metrics["train/num_tokens"] == 0.0
    assert "2 of 2 optimizer steps have nothing to train on" in caplog.text
    assert all(torch.equal(before[name], tensor) for name, tensor in all_weights(backend).items())

    half = train_step(backend, cfg, samples=[*unscored[:4], *samples[4:]])
    alone = start_backend(cfg)
    only = alone.train(0, make_updates(samples, cfg)[0][1:])
    assert half["train/loss"] == only["train/loss"] and half["train/ppo_kl"] == only["train/ppo_kl"] == 0.0
    assert all(torch.equal(tensor, all_weights(alone)[name]) for name, tensor in all_weights(backend).items())


def test_empty_micro_batches_add_nothing(checkpoints: dict[str, Path]):
    """The dummies that keep ranks in step, here on a single rank."""
    cfg = make_config(checkpoints["qwen3"], use_kl_loss=True, kl_loss_coef=0.1, entropy_coef=0.1)
    samples = make_samples(MIXED_LENGTHS)
    results = []
    for dummies in (0, 3):
        (update,) = make_updates(samples, cfg)[0]
        (empty_update,) = make_updates([replace(s, status=s.status) for s in samples[:1]], replace_batch(cfg), dp=2)[1]
        assert empty_update.micro_batches[0].num_tokens == 0
        batches = [*update.micro_batches, *(empty_update.micro_batches * dummies)]
        backend = start_backend(cfg)
        metrics = backend.train(0, [replace(update, micro_batches=batches)])
        results.append((metrics, all_weights(backend)))
    for name in ("loss", "grad_norm", "entropy", "num_tokens", "train_rollout_logprob_abs_diff"):
        assert results[0][0][f"train/{name}"] == results[1][0][f"train/{name}"], name
    assert all(torch.equal(tensor, results[1][1][name]) for name, tensor in results[0][1].items())


def replace_batch(cfg):
    return replace(cfg, rollout=replace(cfg.rollout, rollout_batch_size=1, n_samples_per_prompt=1))


def test_bf16_compute_keeps_float32_masters(checkpoints: dict[str, Path]):
    """A rate that bf16 weights could not express still moves the masters; the loss agrees to bf16 rounding."""
    results = []
    for dtype in ("float32", "bfloat16"):
        cfg = make_config(checkpoints["qwen3"], dtype=dtype, lr=1e-6, entropy_coef=0.1)
        backend = start_backend(cfg)
        before = [p.full_tensor().clone() for p in parts_of(backend).policy.parameters()]
        metrics = train_step(backend, cfg)
        after = [p.full_tensor() for p in parts_of(backend).policy.parameters()]
        moved = torch.cat([(a - b).abs().flatten() for a, b in zip(after, before, strict=True)])
        assert moved.median() > 1e-7 and all(p.dtype == torch.float32 for p in after)
        results.append(metrics)
    assert results[1]["train/loss"] == pytest.approx(results[0]["train/loss"], abs=0.05)
    assert results[1]["train/entropy"] == pytest.approx(results[0]["train/entropy"], rel=0.02)
    assert results[1]["train/entropy"] != results[0]["train/entropy"]
    assert results[1]["train/ppo_kl"] == 0.0


def test_the_number_of_parameters_counts_tied_ones_once(checkpoints: dict[str, Path]):
    for name in ("qwen3", "qwen3-untied"):
        report = FsdpBackend().init(make_config(checkpoints[name]), rank_info(), resume_from=None)
        assert report.num_params == AutoModelForCausalLM.from_pretrained(checkpoints[name]).num_parameters()
        assert report.resumed_step is None


SMALL = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


def test_a_sliding_window_is_honoured(tmp_path: Path):
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**SMALL, sliding_window=4, initializer_range=0.4))
    path = save_checkpoint_dir(model, tmp_path / "mistral")
    cfg = make_config(path, loss_type="sft_loss")
    samples = make_samples(MIXED_LENGTHS)
    loss = train_step(start_backend(cfg), cfg, samples=samples)["train/loss"]
    losses = {}
    for window in (4, None):
        model.config.sliding_window = window
        with torch.no_grad():
            logps, _ = naive_log_probs(model, samples, 1.0, padded=False)
        masks = [torch.tensor(sample.loss_mask, dtype=torch.float32) for sample in samples]
        means = [-(p * m).sum() / m.sum() for p, m in zip(logps, masks, strict=True)]
        losses[window] = (sum(means) / len(means)).item()
    assert loss == pytest.approx(losses[4], rel=1e-5)
    assert abs(losses[4] - losses[None]) > 1e-3, "the window must matter for this test to mean anything"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL)), "softcap"),
        (lambda: GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=8.0, initializer_range=1.0)), "logits"),
    ],
    ids=["attention_softcap", "logits_scaling"],
)
def test_architectures_that_would_be_scored_wrongly_are_refused(make, message: str, tmp_path: Path):
    torch.manual_seed(0)
    path = save_checkpoint_dir(make(), tmp_path / "model")
    with pytest.raises(ConfigError, match=message):
        start_backend(make_config(path))
