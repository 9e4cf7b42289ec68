"""Numbers that describe a rollout or an evaluation. Pure; a sample without a reward never counts as a reward of 0."""

import math
from collections.abc import Sequence

from rlkit.types.ranks import MetricSet
from rlkit.types.samples import Sample, SampleGroup, SampleStatus

DROP_METRIC = "rollout/dynamic_filter/drop_"
"""In front of the reason for which a dynamic sampling filter dropped groups."""
IS_CORRECT = 1.0
"""pass@k counts a sample as right from this reward on."""
EQUAL_REWARDS = 1e-6
"""Rewards of a group that differ by no more than this count as equal."""


def rollout_metrics(
    groups: Sequence[SampleGroup],
    *,
    seconds: float,
    num_reissued: int = 0,
    has_rewards: bool = True,
    log_passrate: bool = False,
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
        if log_passrate:
            metrics |= pass_rates("rollout", scored)
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


def pass_rates(prefix: str, rewards: Sequence[Sequence[float]]) -> MetricSet:
    """`<prefix>/pass@k` for powers of two, over prompts with at least k scored samples; empty where none has two."""
    metrics: MetricSet = {}
    largest, k = max(map(len, rewards), default=0), 1
    while largest > 1 and k <= largest:
        estimates = [
            pass_at_k(len(group), sum(reward >= IS_CORRECT for reward in group), k)
            for group in rewards
            if len(group) >= k
        ]
        metrics[f"{prefix}/pass@{k}"] = sum(estimates) / len(estimates)
        k *= 2
    return metrics


def eval_table(metrics: MetricSet) -> str:
    """The `eval/...` metrics for a person: a line for each set, and one for each of its categories."""
    names = [name.removeprefix("eval/") for name in metrics if name.startswith("eval/") and name.count("/") == 1]
    if not names:
        return ""
    rows = [("evaluation", "score", "pass", "samples", "unscored", "length", "cut")]
    for name in names:
        prefix = f"eval/{name}"
        rates = [key for key in metrics if key.startswith(f"{prefix}/pass@")]
        best = max(rates, key=lambda key: int(key.rpartition("@")[2]), default=None)
        rows.append(
            (
                name,
                f"{metrics[prefix]:.3f}",
                f"{metrics[best]:.3f} @{best.rpartition('@')[2]}" if best is not None else "",
                f"{metrics[f'{prefix}/num_samples']:g}",
                f"{metrics[f'{prefix}/unscored']:g}",
                f"{metrics.get(f'{prefix}/response_length', 0.0):.1f}",
                f"{metrics.get(f'{prefix}/truncated_ratio', 0.0):.1%}",
            )
        )
        categories = sorted(key for key in metrics if key.startswith(f"{prefix}/by/"))
        rows += [(f"  {key.removeprefix(f'{prefix}/by/')}", f"{metrics[key]:.3f}", *[""] * 5) for key in categories]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


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
