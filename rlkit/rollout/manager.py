"""One rollout per step: prompts -> groups -> responses -> rewards -> advantages -> updates for every training rank.

Pure asyncio, no Ray: `orchestration/rollout_worker.py` is the shell around it. Where samples come from is decided by
the config: engines, a file (`--load-debug-rollout-data`), or the prompt file's own answers (SFT). What follows is the
same for all.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlkit.config.rules.paths import read_model_config
from rlkit.config.rules.required import reads_prompts
from rlkit.config.schema import RunConfig
from rlkit.data.prompts import GivenResponses, PromptSource
from rlkit.data.sft import fill_in_label, fill_in_pair
from rlkit.data.tokenizer import eos_token_ids, load_tokenizer
from rlkit.observability.ledger import Ledger, LedgerEvent
from rlkit.observability.spans import SpanName, Spans
from rlkit.rollout.collect import Collection, GroupLedger, ProgressCallback
from rlkit.rollout.debug_data import load_rollout, rollout_path, save_rollout
from rlkit.rollout.evaluate import Evaluator, load_eval_datasets
from rlkit.rollout.group_pool import GroupPool
from rlkit.rollout.guard_facts import guard_facts
from rlkit.rollout.hooks import RolloutHooks
from rlkit.rollout.job import RolloutJob, load_rollout_function, run_job
from rlkit.rollout.metrics import rollout_metrics
from rlkit.rollout.sample_record import SampleRecorder, record_batch
from rlkit.rollout.sampling import context_limit, rollout_sampling
from rlkit.rollout.select import Selection, Selector
from rlkit.rollout.serving import Serving
from rlkit.rollout.source import GroupSource
from rlkit.rollout.staleness import sample_weights, staleness, staleness_metrics
from rlkit.rollout.training_batch import (
    build_shards,
    check_trainable,
    flatten,
    groups_by_rank,
    num_planned_samples,
    shaping_metrics,
    untrained_reason,
)
from rlkit.rollout.weight_versions import check_weight_versions
from rlkit.types.batches import Update
from rlkit.types.gaps import TokenGaps
from rlkit.types.ranks import MetricSet
from rlkit.types.samples import SampleGroup, SampleStatus

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutBatch:
    """What a step trains on."""

    shards: list[list[Update]]
    """[rank][optimizer step]."""
    metrics: MetricSet


@dataclass(frozen=True, kw_only=True, slots=True)
class _Planned:
    """A rollout that is packed and not trained on yet, for the ledger."""

    groups: list[list[int]]
    """[rank] -> ids of groups with a sample there."""
    num_samples: int


class RolloutManager:
    """Owns the prompt source, the graders, the connections to router and engines, and the ledger of sample groups."""

    def __init__(
        self,
        cfg: RunConfig,
        *,
        run_dir: Path,
        dp: int,
        router_url: str | None,
        engine_urls: Sequence[str],
        spans: Spans,
        on_progress: ProgressCallback | None = None,
    ) -> None:
        """Without engines (`cfg.starts_engines`) `router_url` is None. The caller drains `spans`."""
        self._cfg = cfg
        self._dp = dp
        self._spans = spans
        self._on_progress = on_progress
        self._planned: dict[int, _Planned] = {}
        """By step; with `--async-mode one-step` the next one may be packed already."""
        self._states: dict[int, dict[str, Any]] = {}
        """What `state` was before the rollout of each step began, where rollouts begin ahead of training."""
        self._pool: GroupPool | None = None
        self._engine_version = 0
        self._ledger = Ledger(run_dir / "ledger.jsonl")
        self._tokenizer = load_tokenizer(cfg.model)
        self._eos_ids = eos_token_ids(cfg.model, self._tokenizer)
        num_recorded = 0 if cfg.is_supervised else cfg.report.report_samples
        self._samples = SampleRecorder(run_dir, self._tokenizer, num_samples=num_recorded)
        self._run_dir = run_dir
        self._hooks = RolloutHooks.load(cfg)
        self._rollout_function = load_rollout_function(cfg.rollout.rollout_function_path)
        self._source = None
        if reads_prompts(cfg):
            given, keeps = GivenResponses.of(cfg), cfg.keeps_messages
            prompts = PromptSource(cfg.data, self._tokenizer, given=given, keeps_messages=keeps)
            self._source = GroupSource(cfg, prompts, self._ledger)
        self._serving = None
        if cfg.starts_engines:
            assert router_url is not None and engine_urls, "this config starts engines, so there are addresses"
            self._serving = Serving.open(cfg, self._tokenizer, router_url, engine_urls)
        self._evaluator = None
        if cfg.evaluation.eval_interval is not None:
            if self._serving is not None:
                datasets = load_eval_datasets(cfg, self._tokenizer, self._eos_ids)
                serving = self._serving
                self._evaluator = Evaluator(datasets, serving.collector, serving.graders, cfg, run_dir)
            else:
                logger.warning(
                    "no engines, so --eval-interval has no effect: SFT and replayed rollouts evaluate nothing"
                )

    async def generate(self, step: int) -> RolloutBatch:
        """The rollout of one step, packed for every rank.

        Raises EngineError, RewardError or DataError, with what was seen, if nothing in it can be trained on.
        """
        cfg = self._cfg
        if cfg.async_training.is_one_step:
            self._states[step] = self.state()
        groups, selection = await self._collect(step)
        collected = selection.collected
        if cfg.debug.save_debug_rollout_data is not None:
            save_rollout(rollout_path(cfg.debug.save_debug_rollout_data, step), step, groups)
        if cfg.report.record_for_replay > 0:
            record_batch(self._run_dir, step, groups, keep=cfg.report.record_for_replay)
        self._samples.generated(step, groups)
        metrics = rollout_metrics(
            groups,
            seconds=collected.generate_s,
            num_reissued=collected.num_reissued,
            has_rewards=not cfg.is_supervised,
            log_passrate=cfg.rollout.log_passrate,
        )
        if self._hooks.shape_rewards is not None and not cfg.is_supervised:
            self._hooks.shape_rewards(groups)
        if self._hooks.leave_out is not None:
            self._hooks.leave_out(groups)
        self._record_kept(step, groups)
        check_trainable(groups, collected, step=step, require_reward=not cfg.is_supervised)
        if self._serving is not None:
            await check_weight_versions(groups, self._serving.engines, trainer_version=step)
            metrics |= staleness_metrics(flatten(groups), step)
            if self._serving.agents is not None:
                metrics |= self._serving.agents.drain()
        with self._spans(SpanName.PACK):
            weights = sample_weights(cfg.async_training, flatten(groups), step)
            # beside the event loop, which serves engines and agents meanwhile (`--async-mode full`)
            shards = await asyncio.to_thread(build_shards, cfg, groups, self._dp, weights=weights)
            self._planned[step] = _Planned(
                groups=groups_by_rank(groups, shards), num_samples=num_planned_samples(shards)
            )
        metrics |= shaping_metrics(cfg, groups)
        metrics |= await asyncio.to_thread(guard_facts, cfg, groups, self._end_ids())
        if self._source is not None and self._serving is not None:
            metrics |= selection.metrics(self._source.num_waiting + (len(self._pool) if self._pool is not None else 0))
        metrics |= {f"grader/{name}": float(count) for name, count in collected.grader_counts.items()}
        return RolloutBatch(shards=shards, metrics=metrics)

    async def evaluate(self, step: int) -> MetricSet:
        """`eval/...` of the weights that the engines hold; empty without engines."""
        if self._serving is None:
            return {}
        with self._spans(SpanName.EVALUATE):
            await self._serving.start_graders()
            assert self._evaluator is not None, "without --eval-interval nobody asks"
            return await self._evaluator.evaluate(step, self._on_progress)

    def set_engines(self, engine_urls: Sequence[str]) -> None:
        """See `Serving.set_engines`."""
        assert self._serving is not None, "a run whose engines restart has engines"
        self._serving.set_engines(engine_urls)

    def waits(self) -> list[str]:
        """What the running rollout waits for, a sentence each; empty when none runs."""
        last = self._serving.collector.last if self._serving is not None else None
        return last.waits() if last is not None else []

    def set_engine_version(self, version: int) -> None:
        """All engines have these weights now."""
        self._engine_version = version
        if self._pool is not None:
            self._pool.set_engine_version(version)

    def record_trained(self, step: int, gaps: Sequence[TokenGaps] = ()) -> MetricSet:
        """Note which groups each rank has trained on; called when the optimizer steps of the rollout are done. `gaps`:
        what the ranks say about their samples. Returns how busy the engines have been since the last call.
        """
        planned = self._planned.pop(step)
        self._samples.trained(step, gaps)
        self._ledger.write_together(
            LedgerEvent.TRAINED,
            [
                {"step": step, "rank": rank, "groups": group_ids, "step_samples": planned.num_samples}
                for rank, group_ids in enumerate(planned.groups)
            ],
        )
        self._states.pop(step, None)
        return self._serving.generator.use.drain() if self._serving is not None else {}

    def state(self, step: int | None = None) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON: the place in the prompt file, the next group id, the groups that wait.

        `step`: as it is when this one is the last that was trained on: what has begun for later ones is taken back.
        Groups of a pool (`--async-mode full`) wait.
        """
        if self._source is None:
            return {"prompts": None, "next_group_id": 0}
        if step is not None and step + 1 in self._states:
            return self._states[step + 1]
        return self._source.state(self._pool.held() if self._pool is not None else ())

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue where `state()` was taken. A replay has no place in a prompt file."""
        if self._source is not None and state["prompts"] is not None:
            self._source.load_state(state)

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.stop()
        if self._evaluator is not None:
            await self._evaluator.close()
        if self._serving is not None:
            await self._serving.close()
        self._ledger.close()

    def _end_ids(self) -> set[int]:
        return {*self._eos_ids, *self._cfg.rollout.rollout_stop_token_ids}

    # ---- where samples come from -----------------------------------------------------------------------------------

    async def _collect(self, step: int) -> tuple[list[SampleGroup], Selection]:
        if self._cfg.debug.load_debug_rollout_data is not None:
            vocab_size = (read_model_config(self._cfg.model.hf_checkpoint) or {}).get("vocab_size")
            path = rollout_path(self._cfg.debug.load_debug_rollout_data, step)
            _, groups = load_rollout(path, vocab_size=vocab_size)
            return groups, Selection()
        assert self._source is not None
        events = GroupLedger(self._ledger, step)
        if self._serving is None:
            return self._supervised_groups(self._source, events, step), Selection()
        await self._serving.start_graders()
        if self._cfg.async_training.is_full:
            if self._pool is None:
                self._pool = self._open_pool(self._source, self._serving, events)
            selection = await self._pool.take(step)
            self._spans.add(SpanName.GENERATE, selection.collected.generate_s)
            return selection.groups, selection
        collection = self._serving.collector.begin(
            rollout_sampling(self._cfg, self._eos_ids), evaluation=False, on_progress=self._on_progress, ledger=events
        )
        if self._rollout_function is not None:
            path = self._cfg.rollout.rollout_function_path
            job = RolloutJob(self._cfg, self._source, collection, events, step=step)
            selection = await run_job(self._rollout_function, job, collection, str(path))
        else:
            selection = await self._select(collection, events, step)
        collected = selection.collected
        self._spans.add(SpanName.GENERATE, collected.generate_s)
        self._spans.add(SpanName.GRADE, collected.grade_s)
        return selection.groups, selection

    def _open_pool(self, source: GroupSource, serving: Serving, events: GroupLedger) -> GroupPool:
        sampling = rollout_sampling(self._cfg, self._eos_ids)
        return GroupPool(
            self._cfg,
            source,
            serving.collector.begin(sampling, evaluation=False, ledger=events),
            events,
            engine_version=self._engine_version,
            group_filter=self._hooks.group_filter,
            process_all=self._hooks.process_all,
            on_progress=self._on_progress,
        )

    async def _select(self, collection: Collection, events: GroupLedger, step: int) -> Selection:
        assert self._source is not None
        selector = Selector(
            self._cfg,
            self._source,
            step=step,
            group_filter=self._hooks.group_filter,
            ledger=events,
            process_all=self._hooks.process_all,
        )
        return await selector.select(collection)

    def _supervised_groups(self, source: GroupSource, events: GroupLedger, step: int) -> list[SampleGroup]:
        groups = [item.group for item in source.next(self._cfg.rollout.rollout_batch_size, step)]
        kwargs, limit = self._cfg.data.apply_chat_template_kwargs, context_limit(self._cfg)
        for group in groups:
            events.issued(group)
            if self._cfg.is_dpo:
                fill_in_pair(group.samples, group.prompt, self._tokenizer, kwargs)
            else:
                for sample in group.samples:
                    fill_in_label(sample, group.prompt, self._tokenizer, kwargs)
            if limit is not None and any(sample.total_length > limit for sample in group.samples):
                for sample in group.samples:  # a pair goes as a whole
                    sample.status = SampleStatus.TOO_LONG
        return groups

    def _record_kept(self, step: int, groups: Sequence[SampleGroup]) -> None:
        """KEPT for groups of which a sample trains; DROPPED, with the reason, for what is left out."""
        left_out: Counter[str] = Counter()
        for group in groups:
            reasons = [untrained_reason(s, require_reward=not self._cfg.is_supervised) for s in group.samples]
            dropped: dict[str, list[int]] = {}
            for index, reason in enumerate(reasons):
                if reason is not None:
                    dropped.setdefault(reason, []).append(index)
            if None in reasons:
                is_async = self._cfg.async_training.async_mode is not None
                ages = {"staleness": [staleness(sample, step) for sample in group.samples]} if is_async else {}
                self._ledger.write(LedgerEvent.KEPT, step=step, group=group.group_id, **ages)
            for reason, indices in dropped.items():
                left_out[reason] += len(indices)
                which = {"indices": indices} if len(indices) < len(reasons) else {}
                self._ledger.write(LedgerEvent.DROPPED, step=step, group=group.group_id, reason=reason, **which)
        if left_out:
            told = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
            logger.warning(f"step {step}: samples left out of training: {told}")
