import math
import random
import statistics

import pytest
from algo_cases import case
from hypothesis import given
from hypothesis import strategies as st
from packed_batches import EXACT  # noqa: F401  (its import sets the profile of property tests)

from rlkit.algo.advantages import estimate_advantages, group_advantages, leave_one_out_advantages


def test_groups_are_found_by_id_not_by_position():
    ls01 = case("ls-01")
    rewards, groups, expected = ls01["input"]["rewards"], ls01["input"]["group_index"], ls01["expected"]
    assert group_advantages(rewards, groups, divide_by_std=False) == pytest.approx(expected["centred"], abs=1e-9)
    normalised = group_advantages(rewards, groups, divide_by_std=True)
    assert normalised == pytest.approx(expected["centred_over_std_ddof1"], abs=ls01["tolerance"])


def test_estimators_keep_their_documented_conventions():
    ls02 = case("ls-02")
    rewards, expected = ls02["input"]["rewards"], ls02["expected"]
    groups = [0] * len(rewards)

    def first_and_last(advantages: list[float]) -> list[float]:
        return [advantages[0], advantages[-1]]

    grpo = group_advantages(rewards, groups, divide_by_std=True)
    assert first_and_last(grpo) == pytest.approx(expected["grpo_std_ddof1_eps1e-6"], abs=1e-6)
    exact = group_advantages(rewards, groups, divide_by_std=True, eps=0.0)
    assert first_and_last(exact) == pytest.approx(expected["grpo_std_ddof1"], abs=1e-6)
    centred = group_advantages(rewards, groups, divide_by_std=False)
    assert first_and_last(centred) == pytest.approx(expected["mean_only"], abs=1e-9)
    rloo = leave_one_out_advantages(rewards, groups)
    assert first_and_last(rloo) == pytest.approx(expected["rloo"], abs=1e-6)


def test_unscored_samples_are_left_out():
    ls04 = case("ls-04")
    rewards, expected = ls04["input"]["rewards"], ls04["expected"]
    groups = [0] * len(rewards)
    for unscored in (None, math.nan):
        given = [unscored if reward is None else reward for reward in rewards]
        centred = group_advantages(given, groups, divide_by_std=False)
        assert centred == pytest.approx(expected["centred"], abs=1e-6)
        assert leave_one_out_advantages(given, groups) == pytest.approx(expected["rloo"], abs=1e-6)
    nobody = ls04["input"]["all_none_group"]
    for divide in (True, False):
        assert group_advantages(nobody, [0] * len(nobody), divide_by_std=divide) == expected["all_none_group"]
    assert leave_one_out_advantages(nobody, [0] * len(nobody)) == expected["all_none_group"]


@pytest.mark.parametrize("rewards", [[3.0], [0.1, 0.1, 0.1], [1e9 + 0.1] * 5], ids=["singleton", "equal", "large"])
def test_a_group_without_spread_gives_exact_zeros(rewards: list[float]):
    groups = [7] * len(rewards)
    assert group_advantages(rewards, groups, divide_by_std=True) == [0.0] * len(rewards)
    assert leave_one_out_advantages(rewards, groups) == [0.0] * len(rewards)


def test_advantages_equal_the_definition_on_random_groups():
    rng = random.Random(0)
    groups = [rng.randrange(12) for _ in range(100)]
    rewards = [rng.gauss(5.0, 2.0) for _ in groups]
    normalised = group_advantages(rewards, groups, divide_by_std=True)
    left_out = leave_one_out_advantages(rewards, groups)
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        others = [r for j, (r, g) in enumerate(zip(rewards, groups, strict=True)) if g == group and j != i]
        if not others:
            assert normalised[i] == left_out[i] == 0.0
            continue
        members = [*others, reward]
        z_score = (reward - statistics.mean(members)) / (statistics.stdev(members) + 1e-6)
        assert normalised[i] == pytest.approx(z_score, abs=1e-10)
        assert left_out[i] == pytest.approx(reward - statistics.mean(others), abs=1e-10)


def test_the_estimator_flag_chooses_the_function():
    rewards, groups = [1.0, 0.0, 0.0], [0, 0, 0]
    chosen = estimate_advantages(rewards, groups, estimator="grpo", divide_by_std=False)
    assert chosen == group_advantages(rewards, groups, divide_by_std=False)
    chosen = estimate_advantages(rewards, groups, estimator="rloo", divide_by_std=True)
    assert chosen == leave_one_out_advantages(rewards, groups)
    for estimator in ("gspo", "cispo"):
        chosen = estimate_advantages(rewards, groups, estimator=estimator, divide_by_std=True)
        assert chosen == group_advantages(rewards, groups, divide_by_std=True)
    chosen = estimate_advantages([2.0, None, math.nan], groups, estimator="reinforce_plus_plus", divide_by_std=True)
    assert chosen == [2.0, 0.0, 0.0]
    chosen = estimate_advantages(rewards, groups, estimator="reinforce_plus_plus_baseline", divide_by_std=True)
    assert chosen == group_advantages(rewards, groups, divide_by_std=False)


def test_a_rollout_that_fans_out_counts_once():
    """Three rollouts of rewards 1, 0 and 0; the first came out as three samples, one of them unscored."""
    rewards, groups, rollouts = [1.0, 1.0, None, 0.0, 0.0], [4] * 5, ["a", "a", "a", "b", "c"]
    for estimator in ("grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        one, zero, other = estimate_advantages([1.0, 0.0, 0.0], [4] * 3, estimator=estimator, divide_by_std=True)
        found = estimate_advantages(rewards, groups, estimator=estimator, divide_by_std=True, rollouts=rollouts)
        assert found == [one, one, 0.0, zero, other], estimator


@given(
    scored=st.lists(
        st.tuples(st.integers(0, 3), st.one_of(st.none(), st.floats(-5, 5, width=32))), min_size=1, max_size=14
    )
)
def test_every_estimator_equals_its_definition(scored: list[tuple[int, float | None]]):
    groups, rewards = [group for group, _ in scored], [reward for _, reward in scored]
    own = list(range(len(scored)))
    found = {
        name: estimate_advantages(rewards, groups, estimator=name, divide_by_std=divide, rollouts=own)
        for name, divide in (("grpo", True), ("rloo", True), ("reinforce_plus_plus_baseline", True))
    }
    found["dr_grpo"] = estimate_advantages(rewards, groups, estimator="grpo", divide_by_std=False)
    for i, (group, reward) in enumerate(scored):
        members = [r for g, r in scored if g == group and r is not None]
        if reward is None or len(members) < 2:
            assert [values[i] for values in found.values()] == [0.0] * 4
            continue
        others = [r for j, (g, r) in enumerate(scored) if g == group and r is not None and j != i]
        centred = reward - statistics.fmean(members)
        assert found["dr_grpo"][i] == pytest.approx(centred, abs=1e-10)
        assert found["reinforce_plus_plus_baseline"][i] == pytest.approx(centred, abs=1e-10)
        assert found["rloo"][i] == pytest.approx(reward - statistics.fmean(others), abs=1e-10)
        assert found["grpo"][i] == pytest.approx(centred / (statistics.stdev(members) + 1e-6), rel=1e-10, abs=1e-7)
