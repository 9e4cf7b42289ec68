"""Compiled blocks and log-probs equal the eager ones, and one compilation serves packs of all lengths."""

import random
import shutil
from pathlib import Path

import pytest
import torch
from fsdp_setup import all_weights, make_config, make_samples, make_updates, parts_of, start_backend

from rlkit.backends.fsdp.compilation import cache_root, keep_compiled_code, num_compiled_graphs
from rlkit.config.schema import RunConfig
from rlkit.types.ranks import MetricSet
from rlkit.types.samples import Sample

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None, reason="inductor needs a C++ compiler on a CPU"
)


def samples_of_many_lengths(seed: int) -> list[Sample]:
    rng = random.Random(seed)
    return make_samples([(rng.randint(1, 9), rng.randint(1, 40)) for _ in range(8)], seed=seed)


def run(cfg: RunConfig, num_steps: int) -> tuple[list[MetricSet], dict[str, torch.Tensor], list[int], list[int]]:
    """(metrics, weights, lengths of all packs, number of compiled graphs after each step)."""
    backend = start_backend(cfg)
    metrics, lengths, graphs = [], [], []
    for step in range(num_steps):
        updates = make_updates(samples_of_many_lengths(step), cfg)[0]
        lengths += [batch.num_tokens for update in updates for batch in update.micro_batches]
        metrics.append(backend.train(step, updates))
        graphs.append(num_compiled_graphs())
    return metrics, all_weights(backend), lengths, graphs


@needs_compiler
@pytest.mark.timeout(900)  # compiles C++: a minute on a busy machine with 2 cores, more on a very busy one
@pytest.mark.parametrize(("name", "checkpointing"), [("qwen3", False), ("llama", True)], ids=["kept", "recomputed"])
def test_compiled_equals_eager_and_compiles_once(checkpoints: dict[str, Path], name: str, checkpointing: bool):
    torch._dynamo.reset()
    options = {"gradient_checkpointing": checkpointing, "entropy_coef": 0.01, "rollout_temperature": 0.8}
    eager, eager_weights, lengths, _ = run(make_config(checkpoints[name], torch_compile="off", **options), 4)
    before = num_compiled_graphs()
    compiled, weights, _, graphs = run(make_config(checkpoints[name], torch_compile="on", **options), 4)
    assert len(set(lengths)) >= 10
    # all blocks without and with gradients (the check of the scoring, training), log-probs, their gradient; recomputed,
    # a block's input is no view of FSDP2's any more, which are graphs of their own
    assert graphs[0] - before <= (6 if checkpointing else 4)
    assert graphs[-1] - graphs[0] <= 1
    for ours, theirs in zip(compiled, eager, strict=True):
        for metric in ("loss", "grad_norm", "entropy"):
            key = f"train/{metric}"
            assert ours[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-5), metric
    for key, expected in eager_weights.items():
        # Adam's first steps are lr * sign(gradient): where a gradient is rounding noise, so is its sign
        close = (weights[key] - expected).abs() < 2e-4 + 1e-3 * expected.abs()
        assert close.float().mean() > 0.99, key


def test_only_some_blocks_recompute(checkpoints: dict[str, Path]):
    policy = parts_of(start_backend(make_config(checkpoints["qwen3"], gradient_checkpointing=True))).policy
    assert policy.plan.num_checkpointed == 2
    policy = parts_of(start_backend(make_config(checkpoints["qwen3"]))).policy
    assert policy.plan.num_checkpointed == 0 and not policy.plan.is_compiled


def test_caches_lie_in_the_home_folder_unless_the_user_chose_another():
    environment = {"TRITON_CACHE_DIR": "/mine"}
    keep_compiled_code(environment)
    assert environment == {
        "TRITON_CACHE_DIR": "/mine",
        "TORCHINDUCTOR_CACHE_DIR": str(cache_root() / "inductor"),
    }
