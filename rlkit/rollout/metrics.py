"""Numbers that describe a rollout or an evaluation. Pure; a sample without a reward never counts as a reward of 0."""

import math
from collections.abc import Sequence

from rlkit.types.ranks import MetricSet
from rlkit.types.samples import Sample, SampleGroup, SampleStatus

EQUAL_REWARDS = 1e-6
"""Rewards of a group that differ by no more than this count as equal."""


def rollout_metrics(
    groups: Sequence[SampleGroup], *, seconds: float, num_reissued: int = 0, has_rewards: bool = True
) -> MetricSet:
    """`rollout/...` of one step. Without rewards (SFT) lengths only.

    `seconds` is the generation time behind `tokens_per_s`. Reward statistics run over scored samples and are absent
    when there are none; so are length statistics without any finished sample.
    """
    samples = [sample for group in groups for sample in group.samples]
    finished = [sample for sample in samples if sample.status.is_trainable]
    if not has_rewards:
        return {"rollout/num_samples": len(samples), **length_metrics("rollout", finished)}
    metrics: MetricSet = {
        "rollout/num_samples": len(samples),
        "rollout/unscored": sum(sample.reward is None for sample in finished),
        "rollout/aborted": sum(sample.status is SampleStatus.ABORTED for sample in samples),
        "rollout/failed": sum(sample.status is SampleStatus.FAILED for sample in samples),
        "rollout/reissued": num_reissued,
    }
    metrics |= _prefixed("rollout/reward", _spread([s.reward for s in finished if s.reward is not None], std=True))
    metrics |= length_metrics("rollout", finished)
    scored = [rewards for group in groups if (rewards := scored_rewards(group))]
    if scored:
        metrics["rollout/zero_variance_share"] = sum(map(is_zero_variance, scored)) / len(scored)
    if seconds > 0 and finished:
        metrics["rollout/tokens_per_s"] = sum(s.response_length for s in finished) / seconds
    return metrics


def length_metrics(prefix: str, finished: Sequence[Sample]) -> MetricSet:
    """Response lengths (tokens), prompt length and the share cut by a length limit; empty without finished samples."""
    if not finished:
        return {}
    metrics = _prefixed(f"{prefix}/response_length", _spread([s.response_length for s in finished]))
    metrics[f"{prefix}/prompt_length"] = sum(s.prompt_length for s in finished) / len(finished)
    truncated = sum(s.status is SampleStatus.TRUNCATED for s in finished)
    metrics[f"{prefix}/truncated_ratio"] = truncated / len(finished)
    return metrics


def scored_rewards(group: SampleGroup) -> list[float]:
    """Rewards of the samples that finished and were scored; empty for a group that tells nothing."""
    return [s.reward for s in group.samples if s.status.is_trainable and s.reward is not None]


def is_zero_variance(rewards: Sequence[float]) -> bool:
    """All rewards equal (so every advantage is 0), or only one."""
    return max(rewards) - min(rewards) <= EQUAL_REWARDS


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Chance that at least one of k samples, drawn without replacement from `num_samples` of which `num_correct` are
    right, is right.

    The unbiased estimator 1 - C(n-c, k) / C(n, k) of Chen et al. 2021 (arXiv:2107.03374, eq. 1). Needs k <=
    num_samples.
    """
    assert 0 < k <= num_samples and 0 <= num_correct <= num_samples, (num_samples, num_correct, k)
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def _spread(values: Sequence[float], *, std: bool = False) -> MetricSet:
    """Mean under "", then `_min`, `_max` and, asked for, the population standard deviation; empty for no values."""
    if not values:
        return {}
    mean = math.fsum(values) / len(values)
    spread: MetricSet = {"": mean, "_min": min(values), "_max": max(values)}
    if std:
        spread["_std"] = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))
    return spread


def _prefixed(prefix: str, metrics: MetricSet) -> MetricSet:
    return {f"{prefix}{name}": value for name, value in metrics.items()}
