"""Held-out evaluation: every set generated with its own sampling and graded by its own grader, like training samples.

Called by `manager.py`. Seeds depend on the data set, the row and the run's seed but not on the step, so two evaluations
differ by their weights only. A sample without a reward is counted as unscored and is no part of any mean.
"""

import asyncio
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import orjson

from rlkit.config.eval_sets import EvalSet, eval_sets
from rlkit.config.schema import RewardConfig, RunConfig
from rlkit.data.prompts import load_prompts
from rlkit.data.tokenizer import Tokenizer
from rlkit.rewards.pool import GraderPool
from rlkit.rollout.collect import Collected, Collector, ProgressCallback, open_group
from rlkit.rollout.metrics import length_metrics, pass_rates, scored_rewards
from rlkit.rollout.reward_prompts import grader_pool
from rlkit.rollout.sampling import eval_sampling
from rlkit.types.errors import RewardError
from rlkit.types.generation import SamplingParams
from rlkit.types.ranks import MetricSet
from rlkit.types.samples import Prompt, SampleGroup, SampleStatus

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalDataset:
    """One evaluation set, read."""

    settings: EvalSet
    sampling: SamplingParams
    reward: RewardConfig
    prompts: list[Prompt]

    @property
    def name(self) -> str:
        return self.settings.name


def load_eval_datasets(cfg: RunConfig, tokenizer: Tokenizer, eos_ids: Collection[int]) -> list[EvalDataset]:
    """Read every set. ConfigError or DataError for what is wrong with a set or its file."""
    return [_load(cfg, item, tokenizer, eos_ids) for item in eval_sets(cfg)]


def _load(cfg: RunConfig, item: EvalSet, tokenizer: Tokenizer, eos_ids: Collection[int]) -> EvalDataset:
    data = replace(
        cfg.data,
        input_key=item.input_key,
        label_key=item.label_key,
        tool_key=item.tool_key,
        metadata_key=item.metadata_key,
        apply_chat_template=item.apply_chat_template,
        apply_chat_template_kwargs=item.apply_chat_template_kwargs,
        rollout_max_prompt_len=item.max_prompt_len,
    )
    prompts = load_prompts(item.path, data, tokenizer, keeps_messages=cfg.keeps_messages)
    if item.metadata_overrides:
        prompts = [replace(prompt, metadata=prompt.metadata | item.metadata_overrides) for prompt in prompts]
    reward = replace(
        cfg.reward,
        rm_type=item.rm_type,
        custom_rm_path=item.custom_rm_path,
        group_rm=cfg.reward.group_rm and item.custom_rm_path == cfg.reward.custom_rm_path,
        reward_key=item.reward_key,
        eval_reward_key=None,
    )
    return EvalDataset(settings=item, sampling=eval_sampling(cfg, eos_ids, item), reward=reward, prompts=prompts)


class Evaluator:
    """Evaluates the sets of a run. Keeps a pool of graders for each grader that is not the run's own."""

    def __init__(
        self, datasets: Sequence[EvalDataset], collector: Collector, graders: GraderPool, cfg: RunConfig, run_dir: Path
    ) -> None:
        self._datasets = list(datasets)
        self._collector = collector
        self._run_seed = cfg.data.rollout_seed
        self._results = run_dir / "eval.jsonl"
        own = replace(cfg.reward, reward_key=cfg.reward.eval_reward_key or cfg.reward.reward_key, eval_reward_key=None)
        self._pools: dict[RewardConfig, GraderPool] = {own: graders}
        self._opened: list[GraderPool] = []

    async def start_graders(self) -> None:
        """Make sure that every set's grader can be used, before anything is generated."""
        for dataset in self._datasets:
            if dataset.reward not in self._pools:
                pool = self._pools[dataset.reward] = grader_pool(dataset.reward)
                self._opened.append(pool)
                await pool.start()

    async def evaluate(self, step: int, on_progress: ProgressCallback | None = None) -> MetricSet:
        """All sets at once -> `eval/<name>` (mean reward) and `eval/<name>/...`; a line for each in `eval.jsonl`."""
        await self.start_graders()
        progress = _Progress(on_progress)
        runs = [self._run(dataset, progress.part()) for dataset in self._datasets]
        tasks = [asyncio.create_task(run) for run in runs]
        try:
            outcomes = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            raise
        metrics: MetricSet = {}
        for dataset, (groups, collected) in zip(self._datasets, outcomes, strict=True):
            reason = collected.engine_error or collected.grade_error or "their prompts leave no room for a response"
            found = dataset_metrics(dataset.name, groups, reason=reason, category_key=dataset.settings.category_key)
            if unscored := found[f"eval/{dataset.name}/unscored"]:
                told = f"{unscored:g} of {found[f'eval/{dataset.name}/num_samples']:g} samples are unscored"
                logger.warning(f"evaluation of {dataset.name}: {told}: {reason}")
            self._write(step, dataset.name, found)
            metrics |= found
        return metrics

    async def close(self) -> None:
        for pool in self._opened:
            await pool.aclose()

    async def _run(
        self, dataset: EvalDataset, on_progress: ProgressCallback | None
    ) -> tuple[list[SampleGroup], Collected]:
        count = dataset.settings.n_samples_per_eval_prompt
        groups = [
            open_group(prompt, prompt.position, count, run_seed=self._run_seed, stream=f"eval/{dataset.name}")
            for prompt in dataset.prompts
        ]
        collector = self._collector.with_graders(self._pools[dataset.reward])
        collected = await collector.collect(groups, dataset.sampling, evaluation=True, on_progress=on_progress)
        return groups, collected

    def _write(self, step: int, name: str, metrics: MetricSet) -> None:
        prefix = f"eval/{name}"
        values = {key.removeprefix(f"{prefix}/"): value for key, value in metrics.items() if key != prefix}
        line = {"step": step, "name": name, "score": metrics[prefix], **values}
        with self._results.open("ab") as file:
            file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))


class _Progress:
    """Adds up the progress of several collections for one callback."""

    def __init__(self, callback: ProgressCallback | None) -> None:
        self._callback = callback
        self._parts: list[tuple[int, int]] = []

    def part(self) -> ProgressCallback | None:
        callback, number = self._callback, len(self._parts)
        if callback is None:
            return None
        self._parts.append((0, 0))

        def report(done: int, total: int) -> None:
            self._parts[number] = (done, total)
            callback(sum(part[0] for part in self._parts), sum(part[1] for part in self._parts))

        return report


def dataset_metrics(
    name: str, groups: Sequence[SampleGroup], *, reason: str = "", category_key: str | None = None
) -> MetricSet:
    """Mean reward over scored samples, lengths, truncation, pass@k for powers of two (where a prompt has two responses
    or more), and `by/<category>` for each value of `metadata[category_key]`.

    A prompt with unscored samples takes part in pass@k for every k up to the number of its scored ones. A RewardError,
    with the `reason`, if nothing was scored: there is no score to report then, and 0 would be a lie.
    """
    samples = [sample for group in groups for sample in group.samples]
    per_group = [scored_rewards(group) for group in groups]
    rewards = [reward for group in per_group for reward in group]
    if not rewards:
        statuses = {status: sum(s.status is status for s in samples) for status in SampleStatus}
        told = ", ".join(f"{count} {status}" for status, count in statuses.items() if count) or "no prompts"
        raise RewardError(f"evaluation set {name}: none of {len(samples)} samples was scored ({told}): {reason}")
    metrics: MetricSet = {
        f"eval/{name}": sum(rewards) / len(rewards),
        f"eval/{name}/num_samples": len(samples),
        f"eval/{name}/unscored": len(samples) - len(rewards),
        **length_metrics(f"eval/{name}", [s for s in samples if s.status.is_trainable]),
        **pass_rates(f"eval/{name}", per_group),
    }
    by_category: dict[str, list[float]] = {}
    if category_key is not None:
        for group, scored in zip(groups, per_group, strict=True):
            category = str(group.prompt.metadata.get(category_key, "none")).replace("/", "_")
            by_category.setdefault(category, []).extend(scored)
    return metrics | {f"eval/{name}/by/{key}": sum(v) / len(v) for key, v in sorted(by_category.items()) if v}
