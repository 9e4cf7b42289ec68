import random
import time
from collections.abc import Sequence

import pytest
from algo_cases import case

from rlkit.algo.packing import best_fit_decreasing, karmarkar_karp, plan_step
from rlkit.types.batches import StepPlan
from rlkit.types.errors import ConfigError


def all_bins(plan: StepPlan) -> list[list[int]]:
    return [members for rank in plan.micro_batches for members in rank]


def assert_invariants(plan: StepPlan, lengths: Sequence[int], *, dp: int, max_tokens: int, cp: int = 1) -> None:
    """The invariants that `plan_step` states."""
    assert plan.dp == dp
    assert len({len(rank) for rank in plan.micro_batches}) == 1
    assert sorted(sample for members in all_bins(plan) for sample in members) == list(range(len(lengths)))
    for members in all_bins(plan):
        assert sum(lengths[i] for i in members) <= max_tokens * cp or len(members) == 1
    needed = sum(min(length, max_tokens * cp) for length in lengths) / (max_tokens * cp)
    assert plan.num_micro_batches * dp >= needed
    assert plan == plan_step(lengths, dp=dp, max_tokens=max_tokens, cp=cp)


def test_a_sample_longer_than_the_cap_runs_alone():
    pk01 = case("pk-01")
    lengths, cap = pk01["input"]["lengths"], pk01["input"]["max_tokens_per_gpu"]
    plan = plan_step(lengths, dp=1, max_tokens=cap)
    assert_invariants(plan, lengths, dp=1, max_tokens=cap)
    assert plan.num_micro_batches == pk01["expected"]["num_micro_batches"]
    assert [0] in all_bins(plan)


def test_the_cap_is_strict():
    pk03 = case("pk-03")
    cap = pk03["input"]["cap"]
    for lengths, count in zip(pk03["input"]["cases"], pk03["expected"]["num_micro_batches"], strict=True):
        plan = plan_step(lengths, dp=1, max_tokens=cap)
        assert_invariants(plan, lengths, dp=1, max_tokens=cap)
        assert plan.num_micro_batches == count


def test_the_budget_grows_with_context_parallelism():
    pk04 = case("pk-04")
    lengths, cap = pk04["input"]["lengths"], pk04["input"]["max_tokens_per_gpu"]
    counts = [plan_step(lengths, dp=1, max_tokens=cap, cp=cp).num_micro_batches for cp in pk04["input"]["cp_sizes"]]
    assert counts == pk04["expected"]["num_micro_batches"]


def test_dynamic_batch_example():
    plan = plan_step([100, 200, 300], dp=1, max_tokens=300)
    assert sorted(all_bins(plan)) == [[0, 1], [2]]


@pytest.mark.parametrize(
    ("lengths", "dp"), [([], 2), ([5], 4), ([5, 3], 4), ([900, 5], 2)], ids=["none", "one", "two", "oversized"]
)
def test_too_few_samples_leave_empty_micro_batches(lengths: list[int], dp: int):
    plan = plan_step(lengths, dp=dp, max_tokens=100)
    assert_invariants(plan, lengths, dp=dp, max_tokens=100)
    assert plan.num_micro_batches == (1 if lengths else 0)


def test_invariants_hold_on_random_input():
    rng = random.Random(0)
    for _ in range(300):
        cap = rng.randint(1, 60)
        lengths = [rng.randint(1, rng.choice([cap, 2 * cap, 4])) for _ in range(rng.randint(0, 40))]
        dp, cp = rng.choice([1, 2, 3, 8]), rng.choice([1, 1, 2])
        plan = plan_step(lengths, dp=dp, max_tokens=cap, cp=cp)
        assert_invariants(plan, lengths, dp=dp, max_tokens=cap, cp=cp)


def test_ranks_get_nearly_equal_work():
    rng = random.Random(1)
    lengths = [rng.randint(1, 2000) for _ in range(512)]
    plan = plan_step(lengths, dp=8, max_tokens=9000)
    totals = [sum(lengths[i] for members in rank for i in members) for rank in plan.micro_batches]
    assert max(totals) - min(totals) < 0.001 * max(totals)
    for round_of_ranks in zip(*plan.micro_batches, strict=True):
        loads = [sum(lengths[i] for i in members) for members in round_of_ranks]
        assert max(loads) - min(loads) < 0.005 * max(loads)


@pytest.mark.parametrize("cap", [2048, 8192, 10**9])
def test_planning_4096_samples_is_fast(cap: int):
    rng = random.Random(2)
    lengths = [rng.randint(1, 2000) for _ in range(4096)]
    start = time.process_time()
    plan = plan_step(lengths, dp=8, max_tokens=cap)
    assert time.process_time() - start < 1.0  # 0.05 to 0.4 s on an idle core
    assert_invariants(plan, lengths, dp=8, max_tokens=cap)


def test_an_impossible_cap_is_refused():
    with pytest.raises(ConfigError, match="max-tokens-per-gpu 0"):
        plan_step([1, 2], dp=1, max_tokens=0)


def test_karmarkar_karp_on_the_textbook_example():
    """{8, 7, 6, 5, 4}: differencing leaves 16 and 14; greedy leaves 17 and 13."""
    parts = karmarkar_karp([8, 7, 6, 5, 4], 2)
    assert sorted(sum([8, 7, 6, 5, 4][i] for i in part) for part in parts) == [14, 16]


@pytest.mark.parametrize("num_parts", [1, 2, 5, 40])
def test_karmarkar_karp_deals_each_item_once(num_parts: int):
    weights = [random.Random(3).randint(0, 9) + i % 7 for i in range(30)]
    parts = karmarkar_karp(weights, num_parts)
    assert len(parts) == num_parts
    assert sorted(item for part in parts for item in part) == list(range(30))
    loads = [sum(weights[item] for item in part) for part in parts]
    if num_parts <= 5:
        assert max(loads) - min(loads) <= 2


def test_karmarkar_karp_levels_better_than_greedy_on_average():
    rng = random.Random(4)
    ours = greedy = 0
    for _ in range(50):
        weights = [rng.randint(1, 1000) for _ in range(24)]
        parts = karmarkar_karp(weights, 4)
        ours += max(sum(weights[i] for i in part) for part in parts)
        loads = [0] * 4
        for weight in sorted(weights, reverse=True):
            loads[loads.index(min(loads))] += weight
        greedy += max(loads)
    assert ours < greedy


def test_best_fit_decreasing_fills_bins():
    bins = best_fit_decreasing([6, 6, 6, 4, 4, 4], 10)
    assert len(bins) == 3
    assert sorted(item for members in bins for item in members) == list(range(6))
