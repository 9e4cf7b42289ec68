import ast
import inspect

import pytest

from rlkit.algo import memory_plan
from rlkit.algo.memory_plan import GIB, ModelShape, TrainerMemory, model_shape, plan_checkpointing, trainer_memory

SMALL = {
    "num_hidden_layers": 28,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 49_152,
}
"""The shape of Qwen3-0.6B with a small vocabulary."""


def small_shape() -> ModelShape:
    shape = model_shape(SMALL, 490_800_000)
    assert shape is not None
    return shape


def memory(*, is_compiled: bool, num_tokens: int = 15_536, num_ranks: int = 1) -> TrainerMemory:
    return trainer_memory(
        small_shape(),
        num_ranks=num_ranks,
        num_tokens=num_tokens,
        chunk_size=1024,
        is_compiled=is_compiled,
        keeps_weights=num_ranks == 1,
    )


@pytest.mark.parametrize(("is_compiled", "none_gib", "all_gib"), [(False, 45.5, 17.1), (True, 35.5, 17.1)])
def test_activations_agree_with_measured_peaks(is_compiled: bool, none_gib: float, all_gib: float):
    """Peaks of a plain script with packs of 15,536 tokens on one H200, 2026-12-01, without and with checkpointing. What
    the two have in common (states, logits) was the script's own; the difference is the blocks' activations.
    """
    estimate = memory(is_compiled=is_compiled)
    difference = (estimate.peak(0) - estimate.peak(28)) / GIB
    assert difference == pytest.approx(none_gib - all_gib, rel=0.12)


def test_states_follow_from_the_parameters():
    alone, shared = memory(is_compiled=True), memory(is_compiled=True, num_ranks=8)
    assert alone.states == 12 * 490_800_000
    assert shared.states == 12 * 61_350_000
    assert alone.gradients == 4 * 490_800_000 and shared.gradients == 4 * (490_800_000 + 61_350_000)
    assert alone.weights == 2 * 490_800_000 > shared.weights


@pytest.mark.parametrize("room_gib", [12, 14, 20, 25, 30, 60])
def test_the_fewest_blocks_are_chosen_that_fit(room_gib: int):
    estimate = memory(is_compiled=True)
    plan = plan_checkpointing(estimate, room_gib * GIB, 15_536)
    fitting = [count for count in range(29) if estimate.peak(count) <= room_gib * GIB]
    assert plan.num_blocks == (fitting[0] if fitting else 28)
    assert "15,536 tokens" in plan.reason and f"{room_gib}.0" in plan.reason
    assert ("--max-tokens-per-gpu" in plan.reason) == (not fitting)


def test_small_packs_need_no_checkpointing_and_long_ones_do():
    room = 130 * GIB
    assert plan_checkpointing(memory(is_compiled=False), room, 15_536).num_blocks == 0
    long = memory(is_compiled=False, num_tokens=65_536)
    assert 0 < plan_checkpointing(long, room, 65_536).num_blocks < 28


def test_other_architectures_are_not_guessed():
    assert model_shape({**SMALL, "num_experts": 128}, 1) is None
    assert model_shape({"hidden_size": 1024, "vocab_size": 10}, 1) is None
    assert model_shape({**SMALL, "head_dim": None, "num_key_value_heads": None}, 1).keys == 1024  # pyright: ignore


def test_the_dry_run_can_import_it_without_torch():
    imported = [
        node for node in ast.walk(ast.parse(inspect.getsource(memory_plan))) if isinstance(node, ast.ImportFrom)
    ]
    assert all(not str(node.module).startswith(("torch", "rlkit")) for node in imported)
