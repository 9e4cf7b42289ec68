import itertools
import math
import statistics
from collections.abc import Sequence

import pytest
from managed_rollouts import bug_case

from rlkit.rollout.metrics import is_zero_variance, pass_at_k, rollout_metrics, scored_rewards
from rlkit.types.samples import Prompt, Sample, SampleGroup, SampleStatus


def graded_group(
    group_id: int,
    rewards: Sequence[float | None],
    *,
    lengths: Sequence[int] | None = None,
    statuses: Sequence[SampleStatus] | None = None,
) -> SampleGroup:
    lengths = lengths or [4] * len(rewards)
    statuses = statuses or [SampleStatus.COMPLETED] * len(rewards)
    samples = [
        Sample(
            group_id=group_id,
            index=i,
            seed=i,
            tokens=[7] * (3 + lengths[i]),
            prompt_length=3,
            loss_mask=[1] * lengths[i],
            rollout_logprobs=[-0.5] * lengths[i],
            status=statuses[i],
            reward=rewards[i],
        )
        for i in range(len(rewards))
    ]
    return SampleGroup(
        group_id=group_id, prompt=Prompt(position=group_id, epoch=0, token_ids=[7] * 3, text="p"), samples=samples
    )


def test_rr05_none_rewards_are_left_out_and_dicts_are_read_by_key():
    case = bug_case("rr-05")
    key = case["input"]["reward_key"]
    groups = [
        graded_group(i, [None if reward is None else reward[key] for reward in rewards])
        for i, rewards in enumerate(case["input"]["groups"])
    ]
    expected = case["expected"]
    scored = [rewards for group in groups if (rewards := scored_rewards(group))]
    assert scored == expected["scored_groups"]
    assert sum(map(is_zero_variance, scored)) == expected["zero_std_groups"]
    metrics = rollout_metrics(groups, seconds=1.0)
    assert metrics["rollout/reward"] == pytest.approx(expected["mean_reward_over_scored"], abs=case["tolerance"])
    assert metrics["rollout/unscored"] == 2
    assert metrics["rollout/zero_variance_share"] == 1 / 2


def test_reward_and_length_statistics():
    statuses = [SampleStatus.COMPLETED, SampleStatus.TRUNCATED, SampleStatus.COMPLETED, SampleStatus.TRUNCATED]
    rewards = [0.0, 1.0, 0.25, 0.5]
    groups = [graded_group(0, rewards, lengths=[2, 4, 6, 8], statuses=statuses)]
    metrics = rollout_metrics(groups, seconds=2.0, num_reissued=3)
    assert metrics["rollout/reward"] == pytest.approx(statistics.mean(rewards))
    assert metrics["rollout/reward_std"] == pytest.approx(statistics.pstdev(rewards))
    assert (metrics["rollout/reward_min"], metrics["rollout/reward_max"]) == (0.0, 1.0)
    assert metrics["rollout/response_length"] == 5.0
    assert (metrics["rollout/response_length_min"], metrics["rollout/response_length_max"]) == (2, 8)
    assert metrics["rollout/truncated_ratio"] == 0.5
    assert metrics["rollout/tokens_per_s"] == 10.0
    assert metrics["rollout/reissued"] == 3
    assert metrics["rollout/prompt_length"] == 3


def test_aborted_and_failed_samples_are_counted_and_nothing_else():
    statuses = [SampleStatus.COMPLETED, SampleStatus.ABORTED, SampleStatus.FAILED]
    metrics = rollout_metrics([graded_group(0, [1.0, 0.0, None], statuses=statuses, lengths=[4, 2, 0])], seconds=1.0)
    assert (metrics["rollout/aborted"], metrics["rollout/failed"], metrics["rollout/unscored"]) == (1, 1, 0)
    assert metrics["rollout/reward"] == 1.0
    assert metrics["rollout/response_length"] == 4


def test_without_any_score_there_are_no_reward_metrics():
    metrics = rollout_metrics([graded_group(0, [None, None])], seconds=1.0)
    assert metrics["rollout/unscored"] == 2
    assert not any(name.startswith("rollout/reward") or "zero_variance" in name for name in metrics)


def test_a_rollout_without_rewards_reports_lengths_only():
    metrics = rollout_metrics([graded_group(0, [None], lengths=[6])], seconds=0.0, has_rewards=False)
    assert metrics["rollout/response_length"] == 6 and metrics["rollout/num_samples"] == 1
    assert "rollout/unscored" not in metrics


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [([1.0, 1.0], True), ([0.1 + 0.2, 0.3], True), ([0.0, 1e-3], False), ([0.7], True)],
    ids=["equal", "equal-up-to-rounding", "different", "one-sample"],
)
def test_zero_variance(rewards: list[float], expected: bool):
    assert is_zero_variance(rewards) is expected


@pytest.mark.parametrize("num_samples", [1, 4, 5])
def test_pass_at_k_equals_counting_all_subsets(num_samples: int):
    for num_correct in range(num_samples + 1):
        outcomes = [1] * num_correct + [0] * (num_samples - num_correct)
        for k in range(1, num_samples + 1):
            subsets = list(itertools.combinations(outcomes, k))
            counted = sum(any(subset) for subset in subsets) / len(subsets)
            assert math.isclose(pass_at_k(num_samples, num_correct, k), counted, abs_tol=1e-12)
