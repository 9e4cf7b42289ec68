"""Held-out evaluation: the data sets of `--eval-prompt-data`, generated with the `--eval-*` overrides and graded like
training samples.

Called by `manager.py`. Seeds depend on the data set, the row and the run's seed but not on the step, so two evaluations
differ by their weights only. A sample without a reward is counted as unscored and is no part of any mean.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from rlkit.config.schema import RunConfig
from rlkit.data.prompts import load_prompts
from rlkit.data.tokenizer import Tokenizer
from rlkit.rollout.collect import Collector, ProgressCallback, open_group
from rlkit.rollout.metrics import length_metrics, pass_at_k, scored_rewards
from rlkit.types.errors import ConfigError, RewardError
from rlkit.types.generation import SamplingParams
from rlkit.types.ranks import MetricSet
from rlkit.types.samples import Prompt, SampleGroup, SampleStatus

logger = logging.getLogger(__name__)

IS_CORRECT = 1.0
"""pass@k counts a sample as right from this reward on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalDataset:
    name: str
    prompts: list[Prompt]


def load_eval_datasets(cfg: RunConfig, tokenizer: Tokenizer) -> list[EvalDataset]:
    """Read every `name path` pair. A ConfigError for a dangling name or a name given twice."""
    pairs = cfg.evaluation.eval_prompt_data
    if len(pairs) % 2:
        raise ConfigError(f"--eval-prompt-data takes pairs `name path`; {pairs[-1]!r} has no path")
    names, paths = pairs[::2], pairs[1::2]
    if len(set(names)) != len(names):
        raise ConfigError(f"--eval-prompt-data: a name is given twice: {', '.join(names)}")
    input_key = cfg.evaluation.eval_input_key or cfg.data.input_key
    label_key = cfg.evaluation.eval_label_key or cfg.data.label_key
    return [
        EvalDataset(
            name=name, prompts=load_prompts(path, cfg.data, tokenizer, input_key=input_key, label_key=label_key)
        )
        for name, path in zip(names, paths, strict=True)
    ]


async def evaluate(
    datasets: Sequence[EvalDataset],
    collector: Collector,
    sampling: SamplingParams,
    *,
    num_samples: int,
    run_seed: int,
    on_progress: ProgressCallback | None = None,
) -> MetricSet:
    """All data sets at once, `num_samples` responses a prompt -> `eval/<name>` (mean reward) and `eval/<name>/...`."""
    groups = {
        dataset.name: [
            open_group(prompt, prompt.position, num_samples, run_seed=run_seed, stream=f"eval/{dataset.name}")
            for prompt in dataset.prompts
        ]
        for dataset in datasets
    }
    everything = [group for opened in groups.values() for group in opened]
    collected = await collector.collect(everything, sampling, evaluation=True, on_progress=on_progress)

    reason = collected.engine_error or collected.grade_error or "their prompts leave no room for a response"
    metrics: MetricSet = {}
    for name, members in groups.items():
        metrics |= dataset_metrics(name, members, num_samples=num_samples, reason=reason)
    num_unscored = sum(metrics[f"eval/{name}/unscored"] for name in groups)
    if num_unscored:
        logger.warning(
            f"evaluation: {num_unscored:g} of {len(everything) * num_samples} samples are unscored: {reason}"
        )
    return metrics


def dataset_metrics(name: str, groups: Sequence[SampleGroup], *, num_samples: int, reason: str = "") -> MetricSet:
    """Mean reward over scored samples, lengths, truncation, and pass@k for powers of two up to `num_samples` above 1.

    A prompt with unscored samples takes part in pass@k for every k up to the number of its scored ones. A RewardError,
    with the `reason`, if nothing was scored: there is no score to report then, and 0 would be a lie.
    """
    samples = [sample for group in groups for sample in group.samples]
    per_group = [scored_rewards(group) for group in groups]
    rewards = [reward for group in per_group for reward in group]
    if not rewards:
        statuses = {status: sum(s.status is status for s in samples) for status in SampleStatus}
        told = ", ".join(f"{count} {status}" for status, count in statuses.items() if count) or "no prompts"
        raise RewardError(f"--eval-prompt-data {name}: none of {len(samples)} samples was scored ({told}): {reason}")
    metrics: MetricSet = {
        f"eval/{name}": sum(rewards) / len(rewards),
        f"eval/{name}/num_samples": len(samples),
        f"eval/{name}/unscored": len(samples) - len(rewards),
        **length_metrics(f"eval/{name}", [s for s in samples if s.status.is_trainable]),
    }
    k = 1
    while num_samples > 1 and k <= num_samples:
        estimates = [
            pass_at_k(len(group), sum(reward >= IS_CORRECT for reward in group), k)
            for group in per_group
            if len(group) >= k
        ]
        if estimates:
            metrics[f"eval/{name}/pass@{k}"] = sum(estimates) / len(estimates)
        k *= 2
    return metrics
