import math
from pathlib import Path

import pytest
import torch
from fsdp_setup import make_config, parts_of, start_backend, train_step

from rlkit.backends.fsdp.model import named_shards
from rlkit.backends.fsdp.optimizer import ShardOptimizer, decay_steps, learning_rate
from rlkit.config.schema import OptimizerConfig
from rlkit.types.errors import ConfigError


def rates(cfg: OptimizerConfig, count: int, end: int) -> list[float]:
    return [learning_rate(cfg, step, decay_steps=end) for step in range(count)]


def test_constant_schedule_with_warmup():
    cfg = OptimizerConfig(lr=8.0, lr_warmup_iters=4)
    assert rates(cfg, 7, 0) == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0, 8.0]


def test_linear_schedule():
    cfg = OptimizerConfig(lr=1.0, min_lr=0.2, lr_decay_style="linear")
    assert rates(cfg, 6, 4) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_cosine_schedule_after_warmup():
    cfg = OptimizerConfig(lr=1.0, min_lr=0.0, lr_decay_style="cosine", lr_warmup_iters=2)
    expected = [0.5, 1.0] + [0.5 * (1 + math.cos(math.pi * k / 4)) for k in range(5)] + [0.0]
    assert rates(cfg, 8, 6) == pytest.approx(expected, abs=1e-12)


def test_warmup_longer_than_the_decay_ends_at_the_floor():
    cfg = OptimizerConfig(lr=1.0, min_lr=0.1, lr_decay_style="linear", lr_warmup_iters=5)
    assert rates(cfg, 7, 3) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 0.1, 0.1])


def test_halfway_through_a_linear_decay():
    """10 rollouts of 4 optimizer steps, of 20 rollouts in all: the next rate is half of the peak (case rs-02)."""
    cfg = OptimizerConfig(lr=1e-6, lr_decay_style="linear")
    assert learning_rate(cfg, 10 * 4, decay_steps=20 * 4) == pytest.approx(5e-7, abs=1e-12)


def test_the_decay_ends_with_the_run_unless_told_otherwise():
    cfg = make_config(Path("x"), num_rollout=5, num_steps_per_rollout=2, lr_decay_style="linear")
    assert decay_steps(cfg) == 10
    assert decay_steps(make_config(Path("x"), lr_decay_iters=7, lr_decay_style="linear")) == 7
    endless = make_config(Path("x"), num_rollout=None, lr_decay_style="cosine")
    with pytest.raises(ConfigError, match="--lr-decay-style cosine needs an end"):
        decay_steps(endless)


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
