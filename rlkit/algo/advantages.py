"""From rewards to one scalar advantage per sample, by the statistics of its prompt group. Called by `rollout/`.

Groups are found by id, never by position, so they may be interleaved and of any size. A sample without a finite reward
(None or NaN) is left out of its group's statistics and gets 0.

The estimators are those of GRPO (Shao et al. 2024, arXiv:2402.03300, eq. 3), of Dr.GRPO (Liu et al. 2025,
arXiv:2503.20783: centre only), of RLOO (Ahmadian et al. 2024, arXiv:2402.14740: the baseline leaves the sample out) and
of REINFORCE++ (Hu et al. 2025, arXiv:2501.03262: none, or centre only; whitening over the batch follows).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Literal, assert_never

Reward = float | None

SampleEstimator = Literal["grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"]
"""By the name of the algorithm. GSPO and CISPO change the loss and share GRPO's advantages; PPO's need a critic."""


def estimate_advantages(
    rewards: Sequence[Reward],
    group_ids: Sequence[int],
    *,
    estimator: SampleEstimator,
    divide_by_std: bool,
    rollouts: Sequence[Hashable] | None = None,
) -> list[float]:
    """One score a sample, by the estimator that `--advantage-estimator` names. `divide_by_std` concerns GRPO and its
    kin only.

    `rollouts` names the rollout of each sample, unset: its own. Samples that share one (a rollout that fans out) count
    once in the statistics of the group, by the mean of their rewards, and share its advantage.
    """
    if rollouts is not None:
        return _by_rollout(rewards, group_ids, rollouts, estimator=estimator, divide_by_std=divide_by_std)
    match estimator:
        case "grpo" | "gspo" | "cispo":
            return group_advantages(rewards, group_ids, divide_by_std=divide_by_std)
        case "rloo":
            return leave_one_out_advantages(rewards, group_ids)
        case "reinforce_plus_plus" | "ppo":
            return [0.0 if reward is None or not math.isfinite(reward) else float(reward) for reward in rewards]
        case "reinforce_plus_plus_baseline":
            return group_advantages(rewards, group_ids, divide_by_std=False)
        case _:
            assert_never(estimator)


def _by_rollout(
    rewards: Sequence[Reward],
    group_ids: Sequence[int],
    rollouts: Sequence[Hashable],
    *,
    estimator: SampleEstimator,
    divide_by_std: bool,
) -> list[float]:
    scored: dict[Hashable, list[float]] = defaultdict(list)
    group_of: dict[Hashable, int] = {}
    for reward, group_id, rollout in zip(rewards, group_ids, rollouts, strict=True):
        if reward is not None and math.isfinite(reward):
            scored[rollout].append(float(reward))
            assert group_of.setdefault(rollout, group_id) == group_id, f"rollout {rollout} is in two groups"
    means = [math.fsum(values) / len(values) for values in scored.values()]
    by_rollout = estimate_advantages(
        means, [group_of[rollout] for rollout in scored], estimator=estimator, divide_by_std=divide_by_std
    )
    advantage_of = dict(zip(scored, by_rollout, strict=True))
    return [
        0.0 if reward is None or not math.isfinite(reward) else advantage_of[rollout]
        for reward, rollout in zip(rewards, rollouts, strict=True)
    ]


def group_advantages(
    rewards: Sequence[Reward], group_ids: Sequence[int], *, divide_by_std: bool, eps: float = 1e-6
) -> list[float]:
    """Reward minus the mean of its group, over the group's standard deviation (n - 1 in the denominator) plus `eps`.

    A group of equal rewards, or of one scored sample, gives zeros.
    """

    def normalised(scored: list[float]) -> list[float]:
        centred = _centred(scored)
        if not divide_by_std or len(scored) < 2:
            return centred
        std = math.sqrt(sum(value * value for value in centred) / (len(scored) - 1))
        return [value / (std + eps) for value in centred]

    return _by_group(rewards, group_ids, normalised)


def leave_one_out_advantages(rewards: Sequence[Reward], group_ids: Sequence[int]) -> list[float]:
    """Reward minus the mean of the *other* samples of its group. A group of one scored sample gives 0."""

    def left_out(scored: list[float]) -> list[float]:
        if len(scored) < 2:
            return [0.0] * len(scored)
        # r - (sum - r) / (k - 1) = k / (k - 1) * (r - mean), without the cancellation of large sums
        scale = len(scored) / (len(scored) - 1)
        return [scale * value for value in _centred(scored)]

    return _by_group(rewards, group_ids, left_out)


def _centred(scored: list[float]) -> list[float]:
    if min(scored) == max(scored):
        return [0.0] * len(scored)  # exactly: 3 * 0.1 / 3 is not 0.1, and that dust must not pass for a signal
    mean = math.fsum(scored) / len(scored)
    return [value - mean for value in scored]


def _by_group(
    rewards: Sequence[Reward], group_ids: Sequence[int], estimate: Callable[[list[float]], list[float]]
) -> list[float]:
    """Apply `estimate` to the finite rewards of every group; everything else gets 0."""
    members: dict[int, list[int]] = defaultdict(list)
    for position, (reward, group_id) in enumerate(zip(rewards, group_ids, strict=True)):
        if reward is not None and math.isfinite(reward):
            members[group_id].append(position)
    advantages = [0.0] * len(rewards)
    for positions in members.values():
        scored = [float(rewards[position] or 0.0) for position in positions]
        for position, advantage in zip(positions, estimate(scored), strict=True):
            advantages[position] = advantage
    return advantages
