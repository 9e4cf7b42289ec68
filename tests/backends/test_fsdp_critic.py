"""PPO's critic in the trainer: against a plain one, over splits, through checkpoints and sleep."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from critic_cases import PlainCritic, naive_fit, ppo, with_head
from fsdp_setup import (
    all_weights,
    make_config,
    make_uneven_samples,
    parts_of,
    rank_info,
    start_backend,
    train_step,
)
from safetensors.torch import load_file
from transformers import AutoModelForTokenClassification

from rlkit.backends.fsdp.backend import FsdpBackend
from rlkit.backends.fsdp.critic import Critic
from rlkit.config.schema import RunConfig
from rlkit.types.errors import CheckpointError

CRITIC = {"lambd": 0.9, "value_clip": 0.3}


@pytest.fixture
def critic_dir(checkpoints: dict[str, Path], tmp_path: Path) -> Path:
    with_head(checkpoints["qwen3"], tmp_path / "critic")
    return tmp_path / "critic"


def critic_of(backend: FsdpBackend) -> Critic:
    critic = parts_of(backend).critic
    assert critic is not None
    return critic


def critic_state(backend: FsdpBackend) -> dict[str, torch.Tensor]:
    state = critic_of(backend).tensors()
    return {name: getattr(value, "full_tensor", lambda value=value: value)().clone() for name, value in state.items()}


def trained(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith(("train/", "critic/"))}


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_the_critic_equals_a_plain_one(checkpoints: dict[str, Path], critic_dir: Path, gamma: float):
    """Loss, gradient norm, fit, and the policy's loss, which follows from GAE's advantages (its ratio is 1)."""
    cfg = ppo(make_config(checkpoints["qwen3"], gamma=gamma), **CRITIC, critic_load=str(critic_dir))
    samples = make_uneven_samples()
    metrics = train_step(start_backend(cfg), cfg, samples=samples)
    plain = PlainCritic(checkpoints["qwen3"], load_file(critic_dir / "model.safetensors")["score.weight"])
    expected = naive_fit(plain, cfg, samples)
    assert metrics["critic/loss"] == pytest.approx(expected.loss, rel=1e-5)
    assert metrics["critic/grad_norm"] == pytest.approx(expected.grad_norm, rel=1e-5)
    assert metrics["critic/explained_variance"] == pytest.approx(expected.explained_variance, rel=1e-5)
    assert metrics["critic/value_mean"] == pytest.approx(expected.value_mean, rel=1e-5)
    assert metrics["critic/clip_fraction"] == 0.0
    kept = [(s, a) for s, a in zip(samples, expected.advantages, strict=True) if any(s.loss_mask)]
    means = [a[torch.tensor(s.loss_mask, dtype=torch.bool)].mean() for s, a in kept]
    assert metrics["train/loss"] == pytest.approx(-torch.stack(means).mean().item(), rel=1e-5)


def test_a_critic_without_a_head_starts_at_zero(checkpoints: dict[str, Path]):
    cfg = ppo(make_config(checkpoints["qwen3"]), critic_lr=1e-2)
    backend = start_backend(cfg)
    metrics = train_step(backend, cfg, 0)
    assert metrics["critic/value_mean"] == 0.0 and metrics["critic/explained_variance"] == 0.0
    assert metrics["critic/return_mean"] > 0.1
    assert train_step(backend, cfg, 0)["critic/value_mean"] != 0.0


def test_the_critic_learns_to_foretell(checkpoints: dict[str, Path]):
    cfg = ppo(make_config(checkpoints["qwen3"], lr=0.0), critic_lr=3e-3, value_clip=10.0)
    backend = start_backend(cfg)
    fits = [train_step(backend, cfg, 0)["critic/explained_variance"] for _ in range(40)]
    assert fits[0] == 0.0 and fits[-1] > 0.9


def test_a_clipped_value_stops_pulling(checkpoints: dict[str, Path]):
    """Several optimizer steps on one rollout move values beyond a narrow clip."""
    cfg = ppo(make_config(checkpoints["qwen3"], num_steps_per_rollout=4, lr=0.0), critic_lr=1e-2, value_clip=1e-3)
    assert train_step(start_backend(cfg), cfg, 0)["critic/clip_fraction"] > 0.2
    wide = replace(cfg, critic=replace(cfg.critic, value_clip=100.0))
    assert train_step(start_backend(wide), wide, 0)["critic/clip_fraction"] == 0.0


@pytest.mark.parametrize("max_tokens", [1, 38, 10_000])
def test_splits_do_not_change_the_step(checkpoints: dict[str, Path], critic_dir: Path, max_tokens: int):
    results = []
    for limit in (64, max_tokens):
        cfg = make_config(checkpoints["qwen3"], max_tokens_per_gpu=limit, num_steps_per_rollout=2)
        cfg = ppo(cfg, **CRITIC, critic_load=str(critic_dir))
        results.append(trained(train_step(start_backend(cfg), cfg, 0)))
    assert results[0].keys() == results[1].keys()
    for name, value in results[0].items():
        assert results[1][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_the_policy_waits_for_the_critic(checkpoints: dict[str, Path]):
    cfg = ppo(make_config(checkpoints["qwen3"], lr_decay_style="linear"), critic_lr=1e-2, num_critic_only_steps=2)
    backend = start_backend(cfg)
    before = all_weights(backend)
    rates = []
    for step in range(2):
        metrics = train_step(backend, cfg, step)
        assert "train/loss" not in metrics and metrics["critic/grad_norm"] > 0
        rates.append(metrics["critic/lr"])
    assert all(torch.equal(value, before[name]) for name, value in all_weights(backend).items())
    metrics = train_step(backend, cfg, 2)
    # the critic's schedule spans the run of three steps, the policy's what is left of it
    assert [*rates, metrics["critic/lr"]] == pytest.approx([1e-2, 2e-2 / 3, 1e-2 / 3])
    assert metrics["train/lr"] == cfg.optimizer.lr
    assert any(not torch.equal(value, before[name]) for name, value in all_weights(backend).items())


@pytest.mark.parametrize("full", [False, True])
def test_a_resumed_run_equals_an_uninterrupted_one(checkpoints: dict[str, Path], tmp_path: Path, full: bool):
    """Bit for bit: both models, both optimizers, both schedules."""
    cfg = make_config(checkpoints["llama"], lr_decay_style="cosine", num_steps_per_rollout=2, fsdp_full_params=full)
    cfg = ppo(cfg, **CRITIC, critic_lr=5e-3, critic_lr_warmup_iters=3, num_critic_only_steps=1)
    first = start_backend(cfg)
    for step in range(2):
        train_step(first, cfg, step)
    first.save(1, tmp_path / "saved", hf_directory=None)
    uninterrupted = train_step(first, cfg, 2)
    second = start_backend(cfg, resume_from=tmp_path / "saved")
    resumed = train_step(second, cfg, 2)
    assert trained(resumed) == trained(uninterrupted)
    states = [(all_weights(backend), critic_state(backend)) for backend in (first, second)]
    for ours, theirs in zip(*states, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert first.fingerprint() == second.fingerprint()
    assert any(name.startswith("critic.exp_avg.") for name in first.fingerprint())


def test_an_async_save_holds_the_critic_of_its_moment(checkpoints: dict[str, Path], tmp_path: Path):
    cfg = ppo(make_config(checkpoints["qwen3"], async_save=True), critic_lr=1e-2)
    backend = start_backend(cfg)
    train_step(backend, cfg, 0)
    saved = critic_state(backend)
    backend.save(0, tmp_path / "saved", hf_directory=None)
    train_step(backend, cfg, 1)
    backend.finish_save()
    again = critic_state(start_backend(cfg, resume_from=tmp_path / "saved"))
    assert all(torch.equal(value, saved[name]) for name, value in again.items())


def test_a_checkpoint_without_a_critic_needs_another_start(checkpoints: dict[str, Path], tmp_path: Path):
    grpo = make_config(checkpoints["qwen3"])
    backend = start_backend(grpo)
    train_step(backend, grpo, 0)
    backend.save(0, tmp_path / "saved", hf_directory=None)
    with pytest.raises(CheckpointError, match=r"holds no critic.*--critic-load"):
        start_backend(ppo(grpo), resume_from=tmp_path / "saved")
    cfg = ppo(grpo, critic_load=str(checkpoints["qwen3"]))
    metrics = train_step(start_backend(cfg, resume_from=tmp_path / "saved"), cfg, 1)
    assert metrics["critic/value_mean"] == 0.0


def test_a_run_without_a_critic_leaves_one_in_the_checkpoint(checkpoints: dict[str, Path], tmp_path: Path):
    cfg = ppo(make_config(checkpoints["qwen3"]))
    backend = start_backend(cfg)
    train_step(backend, cfg, 0)
    backend.save(0, tmp_path / "saved", hf_directory=None)
    again = start_backend(make_config(checkpoints["qwen3"]), resume_from=tmp_path / "saved")
    assert all(torch.equal(value, all_weights(backend)[name]) for name, value in all_weights(again).items())


def test_an_exported_critic_is_a_token_classifier_and_a_start(
    checkpoints: dict[str, Path], critic_dir: Path, tmp_path: Path
):
    cfg = make_config(checkpoints["qwen3"])
    cfg = ppo(cfg, critic_load=str(critic_dir), critic_save=str(tmp_path / "export_{rollout_id}"), critic_lr=1e-2)
    backend = start_backend(cfg)
    train_step(backend, cfg, 0)
    backend.save(4, tmp_path / "saved", hf_directory=None)
    exported = tmp_path / "export_4"
    stored = load_file(exported / "model.safetensors")
    state = {name.removeprefix("critic.model."): value for name, value in critic_state(backend).items()}
    assert all(torch.equal(value, state[name]) for name, value in stored.items())
    theirs = AutoModelForTokenClassification.from_pretrained(exported)
    assert theirs.num_labels == 1 and torch.equal(theirs.score.weight, stored["score.weight"])
    again = ppo(make_config(checkpoints["qwen3"]), critic_load=str(exported))
    ours = critic_state(start_backend(again))
    assert all(torch.equal(ours[f"critic.model.{name}"], value) for name, value in stored.items())


def test_sleep_is_neutral(checkpoints: dict[str, Path]):
    cfg = ppo(make_config(checkpoints["qwen3"]), critic_lr=1e-2)
    results = []
    for sleeps in (False, True):
        backend = start_backend(cfg)
        train_step(backend, cfg, 0)
        if sleeps:
            backend.sleep()
            backend.wake_up()
        train_step(backend, cfg, 1)
        results.append({**all_weights(backend), **critic_state(backend)})
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


def test_the_critic_can_leave_the_device_between_steps(checkpoints: dict[str, Path]):
    """The machinery of a GPU, on CPU tensors: away after each use, back for the next, and for a save."""
    cfg = ppo(make_config(checkpoints["qwen3"]), critic_lr=1e-2)
    results = []
    for leaves in (False, True):
        backend = start_backend(cfg)
        critic = critic_of(backend)
        for step in range(2):
            train_step(backend, cfg, step)
            if leaves:
                local = [p.to_local().detach() for p in critic.model.parameters()]
                critic._swap.offload([*local, *critic._optimizer.state_tensors()])
                assert all(tensor.untyped_storage().nbytes() == 0 for tensor in local if tensor.numel())
        results.append(backend.fingerprint())
    assert results[0] == results[1]


def test_the_critic_is_trained_as_a_whole_beside_adapters(checkpoints: dict[str, Path]):
    cfg: RunConfig = ppo(make_config(checkpoints["qwen3"], lora_rank=2), critic_lr=1e-2)
    backend = FsdpBackend()
    report = backend.init(cfg, rank_info(), resume_from=None)
    before = critic_state(backend)
    for step in range(2):
        train_step(backend, cfg, step)
    moved = [name for name, value in critic_state(backend).items() if not torch.equal(value, before[name])]
    assert "critic.model.score.weight" in moved and "critic.model.model.embed_tokens.weight" in moved
    assert report.num_critic_params > 0


@pytest.mark.gpu
def test_on_a_gpu_the_critic_leaves_between_steps(checkpoints: dict[str, Path], tmp_path: Path):
    """The same numbers as on a CPU, the GPU free of it after every use, and a save that reads it all the same."""
    cfg = ppo(make_config(checkpoints["qwen3"]), critic_lr=1e-3)
    backend = FsdpBackend()
    backend.init(cfg, rank_info(device="cuda"), resume_from=None)
    critic, twin = critic_of(backend), start_backend(cfg)
    for step in range(2):
        assert critic._swap.is_away
        found, expected = train_step(backend, cfg, step), train_step(twin, cfg, step)
        for name in ("loss", "grad_norm", "value_mean", "explained_variance"):
            assert found[f"critic/{name}"] == pytest.approx(expected[f"critic/{name}"], rel=1e-3, abs=1e-4), name
    backend.sleep()
    backend.wake_up()
    backend.save(1, tmp_path / "saved", hf_directory=None)
    assert critic._swap.is_away
    again = FsdpBackend()
    again.init(cfg, rank_info(device="cuda"), resume_from=tmp_path / "saved")
    assert again.fingerprint() == backend.fingerprint()
    assert critic._swap.is_away and critic_of(again)._swap.is_away
