"""Loss scaling: the rule by itself, and float16 training against float32."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_setup import all_weights, make_config, parts_of, start_backend, train_step

from rlkit.backends.loss_scale import LossScale
from rlkit.config.schema import PrecisionConfig
from rlkit.types.errors import TrainError


def run(scale: LossScale, events: str) -> list[float]:
    """Scale after each step: `.` taken, `x` skipped."""
    values = []
    for event in events:
        scale.step_taken() if event == "." else scale.step_skipped("step 3")
        values.append(scale.value)
    return values


def test_the_scale_waits_for_the_second_overflow_and_then_follows_each():
    scale = LossScale(PrecisionConfig(fp16=True, initial_loss_scale=64, loss_scale_window=3))
    assert run(scale, "x.xx") == [64, 64, 32, 16]
    assert run(scale, "...") == [16, 16, 32]
    assert run(scale, "xx...") == [32, 16, 16, 16, 32]
    assert scale.num_skipped == 5


def test_an_overflow_at_the_smallest_scale_is_an_error():
    scale = LossScale(PrecisionConfig(fp16=True, initial_loss_scale=4, min_loss_scale=2, hysteresis=1))
    assert run(scale, "x") == [2]
    with pytest.raises(TrainError, match=r"step 3: gradients overflow float16 even at a loss scale of 2"):
        scale.step_skipped("step 3")


def test_a_fixed_scale_stays():
    scale = LossScale(PrecisionConfig(fp16=True, loss_scale=8.0))
    assert run(scale, "xxx" + "." * 2000)[-1] == 8.0
    assert scale.num_skipped == 3
    assert LossScale(PrecisionConfig()).value == 1.0


def test_a_resumed_scale_goes_on_where_it_was():
    events = "..x.xx....x"
    cfg = PrecisionConfig(fp16=True, initial_loss_scale=64, loss_scale_window=3)
    whole = run(LossScale(cfg), events)
    for cut in range(len(events)):
        first, second = LossScale(cfg), LossScale(cfg)
        values = run(first, events[:cut])
        second.load(first.state())
        assert values + run(second, events[cut:]) == whole


def fp16_config(path: Path, **changes: Any) -> Any:
    return make_config(path, dtype="auto", fp16=True, **changes)


def test_float16_trains_like_float32(checkpoints: dict[str, Path]):
    half, full = fp16_config(checkpoints["qwen3"]), make_config(checkpoints["qwen3"])
    ours, theirs = start_backend(half), start_backend(full)
    one, two = train_step(ours, half), train_step(theirs, full)
    assert one["train/grad_norm"] == pytest.approx(two["train/grad_norm"], rel=2e-2)
    assert one["train/entropy"] == pytest.approx(two["train/entropy"], rel=1e-2)
    assert (one["train/loss_scale"], one["train/num_skipped_steps"]) == (65536.0, 0.0)
    assert "train/loss_scale" not in two
    assert {tensor.dtype for tensor in all_weights(ours).values()} == {torch.float16}


def test_a_power_of_two_changes_no_bit(checkpoints: dict[str, Path]):
    """Gradients in float32 range: scaled up, then down."""
    results = []
    for scale in (1.0, 1024.0):
        cfg = fp16_config(checkpoints["qwen3"], loss_scale=scale, clip_grad=0.0)
        backend = start_backend(cfg)
        results.append(train_step(backend, cfg)["train/grad_norm"])
    assert results[1] == pytest.approx(results[0], rel=1e-3)


def test_overflowing_steps_are_skipped_counted_and_survive_a_resume(checkpoints: dict[str, Path], tmp_path: Path):
    """A scale far too large: nothing moves, no rate is used up, the scale falls until a step is taken."""
    cfg = fp16_config(checkpoints["qwen3"], initial_loss_scale=2.0**40, hysteresis=1, lr_warmup_iters=100)
    backend = start_backend(cfg)
    before = all_weights(backend)
    first = train_step(backend, cfg, 0)
    assert (first["train/num_skipped_steps"], first["train/grad_norm"]) == (1.0, 0.0)
    assert first["train/loss_scale"] == 2.0**39
    assert all(torch.equal(value, before[name]) for name, value in all_weights(backend).items())
    backend.save(0, tmp_path / "saved", hf_directory=None)
    resumed = start_backend(cfg, resume_from=tmp_path / "saved")
    rows = [[train_step(b, cfg, step) for step in range(1, 40)] for b in (backend, resumed)]
    for one, two in zip(*rows, strict=True):
        for metric in ("loss_scale", "num_skipped_steps", "grad_norm", "lr", "loss"):
            assert one[f"train/{metric}"] == two[f"train/{metric}"], metric
    taken = [row for row in rows[0] if row["train/grad_norm"] > 0]
    assert taken and taken[-1]["train/num_skipped_steps"] > 5
    assert taken[0]["train/lr"] == pytest.approx(cfg.optimizer.lr / 100), "skipped steps use up no warm-up"
    assert parts_of(backend).trainer.optimizer_steps == len(taken)
