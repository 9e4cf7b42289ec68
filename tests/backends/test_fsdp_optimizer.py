import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_setup import all_weights, make_config, parts_of, start_backend, train_step
from safetensors.torch import load_file

from rlkit.backends.fsdp.model import named_shards
from rlkit.backends.fsdp.optimizer import ShardOptimizer
from rlkit.backends.schedules import Schedule
from rlkit.config.schema import OptimizerConfig
from rlkit.types.errors import CheckpointError, ConfigError


def schedule(cfg: OptimizerConfig, end: int | None) -> Schedule:
    return Schedule(cfg=cfg, warmup_steps=cfg.lr_warmup_iters, end=end)


def rates(cfg: OptimizerConfig, count: int, end: int | None) -> list[float]:
    return [schedule(cfg, end).rate(step) for step in range(count)]


def test_constant_schedule_with_warmup():
    cfg = OptimizerConfig(lr=8.0, lr_warmup_iters=4)
    assert rates(cfg, 7, 0) == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0, 8.0]
    cfg = OptimizerConfig(lr=8.0, lr_warmup_iters=4, lr_warmup_init=4.0)
    assert rates(cfg, 6, None) == [5.0, 6.0, 7.0, 8.0, 8.0, 8.0]


def test_linear_schedule():
    cfg = OptimizerConfig(lr=1.0, min_lr=0.2, lr_decay_style="linear")
    assert rates(cfg, 6, 4) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_cosine_schedule_after_warmup():
    cfg = OptimizerConfig(lr=1.0, min_lr=0.0, lr_decay_style="cosine", lr_warmup_iters=2)
    expected = [0.5, 1.0] + [0.5 * (1 + math.cos(math.pi * k / 4)) for k in range(5)] + [0.0]
    assert rates(cfg, 8, 6) == pytest.approx(expected, abs=1e-12)


def test_inverse_square_root_schedule():
    cfg = OptimizerConfig(lr=1.0, min_lr=0.3, lr_decay_style="inverse-square-root", lr_warmup_iters=4)
    expected = [0.25, 0.5, 0.75, 1.0, 1.0, (4 / 5) ** 0.5, (4 / 6) ** 0.5]
    assert rates(cfg, 7, None) == pytest.approx(expected)
    assert schedule(cfg, None).rate(1000) == 0.3
    assert schedule(cfg, 6).rate(6) == 0.3, "the end that was asked for"
    cfg = OptimizerConfig(lr=1.0, lr_decay_style="inverse-square-root")
    assert rates(cfg, 5, None) == pytest.approx([1.0, 1.0, 0.5**0.5, 3**-0.5, 0.5])


WSD_DECAYS = {
    "linear": [0.75, 0.5, 0.25],
    "cosine": [0.5 + 0.5 * 0.5**0.5, 0.5, 0.5 - 0.5 * 0.5**0.5],
    "exponential": [2 * 0.5**0.25 - 1, 2 * 0.5**0.5 - 1, 2 * 0.5**0.75 - 1],
    "minus_sqrt": [0.5, 1 - 0.5**0.5, 1 - 0.75**0.5],
}


@pytest.mark.parametrize("style", WSD_DECAYS)
def test_wsd_rises_stays_and_falls(style: Any):
    cfg = OptimizerConfig(
        lr=1.0, lr_decay_style="WSD", lr_warmup_iters=2, lr_wsd_decay_style=style, lr_wsd_decay_iters=4
    )
    assert rates(cfg, 12, 10) == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, *WSD_DECAYS[style], 0.0, 0.0])
    floored = replace(cfg, min_lr=0.5)
    assert rates(floored, 12, 10) == pytest.approx([0.5] + [0.5 + 0.5 * rate for rate in rates(cfg, 12, 10)[1:]])


def test_warmup_longer_than_the_decay_ends_at_the_floor():
    cfg = OptimizerConfig(lr=1.0, min_lr=0.1, lr_decay_style="linear", lr_warmup_iters=5)
    assert rates(cfg, 7, 3) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 0.1, 0.1])


def test_halfway_through_a_linear_decay():
    """10 rollouts of 4 optimizer steps, of 20 rollouts in all: the next rate is half of the peak (case rs-02)."""
    cfg = OptimizerConfig(lr=1e-6, lr_decay_style="linear")
    assert schedule(cfg, 20 * 4).rate(10 * 4) == pytest.approx(5e-7, abs=1e-12)


def test_the_decay_ends_with_the_run_unless_told_otherwise():
    cfg = make_config(Path("x"), num_rollout=5, num_steps_per_rollout=2, lr_decay_style="linear")
    assert Schedule.of(cfg).end == 10
    assert Schedule.of(make_config(Path("x"), lr_decay_iters=7, lr_decay_style="linear")).end == 7
    endless = make_config(Path("x"), num_rollout=None, lr_decay_style="cosine")
    with pytest.raises(ConfigError, match="--lr-decay-style cosine needs an end"):
        Schedule.of(endless)
    assert Schedule.of(make_config(Path("x"), num_rollout=None)).end is None


def test_warmup_as_a_share_of_the_decay():
    cfg = make_config(Path("x"), num_rollout=5, num_steps_per_rollout=4, lr=1.0, lr_warmup_fraction=0.2)
    assert [Schedule.of(cfg).rate(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert Schedule.of(make_config(Path("x"), lr_warmup_fraction=0.5, lr_decay_iters=6)).warmup_steps == 3
    with pytest.raises(ConfigError, match=r"--lr-warmup-fraction 0\.5 of an unknown length"):
        Schedule.of(make_config(Path("x"), num_rollout=None, lr_warmup_fraction=0.5))


def test_reset_states_make_every_rollout_a_first_one(checkpoints: dict[str, Path]):
    """With a constant rate the second rollout moves the weights as if it were the first; kept moments move them
    otherwise.
    """
    once = make_config(checkpoints["qwen3"], reset_optimizer_states=True)
    resetting, keeping = start_backend(once), start_backend(make_config(checkpoints["qwen3"]))
    for backend in (resetting, keeping):
        train_step(backend, once, 0)
    fresh = start_backend(once)
    with torch.no_grad():
        for (_, target), (_, shard) in zip(
            named_shards(parts_of(fresh).policy), named_shards(parts_of(resetting).policy), strict=True
        ):
            target.copy_(shard)
    for backend in (resetting, keeping, fresh):
        train_step(backend, once, 1)
    after, expected, other = all_weights(resetting), all_weights(fresh), all_weights(keeping)
    assert all(torch.equal(after[name], value) for name, value in expected.items())
    assert any(not torch.equal(after[name], value) for name, value in other.items())


FREEZING = {
    "only": ({"only_train_params_name_list": (r"layers\.1\..*proj", "model.norm")}, r"layers\.1\..*proj|model\.norm"),
    "freeze": ({"freeze_params_name_list": ("embed_tokens", "layernorm")}, r"^(?!.*(embed_tokens|layernorm)).*$"),
}


@pytest.mark.parametrize("name", FREEZING)
def test_frozen_parameters_do_not_move(checkpoints: dict[str, Path], tmp_path: Path, name: str):
    """Bit for bit, with weight decay and after a resume; they are still sent and exported. What is trained gets the
    gradients that it gets when nothing is frozen.
    """
    changes, trained = FREEZING[name]
    cfg = make_config(checkpoints["llama"], weight_decay=0.5, clip_grad=0.0, **changes)
    backend = start_backend(cfg)
    whole = start_backend(make_config(checkpoints["llama"], weight_decay=0.5, clip_grad=0.0))
    before = all_weights(backend)
    train_step(backend, cfg, 0)
    train_step(whole, cfg, 0)
    moved, moved_whole = all_weights(backend), all_weights(whole)
    assert moved.keys() == before.keys()
    for key, value in before.items():
        if re.search(trained, key):
            assert not torch.equal(moved[key], value), key
            assert torch.equal(moved[key], moved_whole[key]), key
        else:
            assert torch.equal(moved[key], value), key
    backend.save(0, tmp_path / "saved", hf_directory=tmp_path / "hf")
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert all(torch.equal(exported[key], value) for key, value in moved.items())
    resumed = start_backend(cfg, resume_from=tmp_path / "saved")
    for other in (backend, resumed):
        train_step(other, cfg, 1)
    assert all(torch.equal(all_weights(resumed)[key], value) for key, value in all_weights(backend).items())
    with pytest.raises(CheckpointError, match="the same trained parameters"):
        start_backend(make_config(checkpoints["llama"]), resume_from=tmp_path / "saved")


def test_names_that_select_nothing_are_errors(checkpoints: dict[str, Path]):
    with pytest.raises(ConfigError, match=r"--freeze-params-name-list 'embd' matches none of the \d+ parameters"):
        start_backend(make_config(checkpoints["qwen3"], freeze_params_name_list=("embd",)))
    with pytest.raises(ConfigError, match="leaves no parameter to train"):
        start_backend(make_config(checkpoints["qwen3"], freeze_params_name_list=("model",)))


def test_only_matrices_decay(checkpoints: dict[str, Path]):
    """With zero gradients AdamW does nothing but decay."""
    cfg = make_config(checkpoints["llama"], lr=0.5, weight_decay=0.2)
    backend = start_backend(cfg)
    policy = parts_of(backend).policy
    optimizer = ShardOptimizer(policy, cfg.optimizer)
    before = {name: shard.full_tensor().clone() for name, shard in named_shards(policy)}
    for _, shard in named_shards(policy):
        shard.grad = torch.zeros_like(shard)
    optimizer.step(lr=0.5)
    assert {tensor.dim() for tensor in before.values()} == {1, 2}
    for name, shard in named_shards(policy):
        factor = 1.0 - 0.5 * 0.2 if shard.dim() == 2 else 1.0
        torch.testing.assert_close(shard.full_tensor(), before[name] * factor, msg=name)


def test_the_gradient_is_clipped_as_a_whole(checkpoints: dict[str, Path]):
    """Adam's first step does not see a common factor, its second moment does: compare that."""
    results = []
    for limit in (0.0, 1e-3):
        cfg = make_config(checkpoints["qwen3"], clip_grad=limit)
        backend = start_backend(cfg)
        norm = train_step(backend, cfg)["train/grad_norm"]
        optimizer = parts_of(backend).optimizer
        moments = [state["exp_avg"] for state in optimizer.adamw.state.values()]
        results.append((norm, torch.nn.utils.get_total_norm(moments).item() / (1 - cfg.optimizer.adam_beta1)))
    (norm, applied), (norm_again, clipped) = results
    assert norm == norm_again == pytest.approx(applied, rel=1e-5)
    assert clipped == pytest.approx(1e-3, rel=1e-2)
