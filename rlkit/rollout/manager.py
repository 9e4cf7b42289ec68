"""One rollout per step: prompts -> groups -> responses -> rewards -> advantages -> updates for every training rank.

Pure asyncio, no Ray: `orchestration/rollout_worker.py` is the shell around it. Where samples come from is decided by
the config: engines, a file (`--load-debug-rollout-data`), or the prompt file's own answers (SFT). What follows is the
same for all.
"""

import logging
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rlkit.config.schema import RunConfig
from rlkit.data.prompts import PromptSource
from rlkit.data.sft import fill_in_label
from rlkit.data.tokenizer import Tokenizer, eos_token_ids, load_tokenizer
from rlkit.engines.client import EngineClient, RouterClient
from rlkit.observability.ledger import Ledger, LedgerEvent
from rlkit.observability.spans import SpanName, Spans
from rlkit.rewards.pool import GraderPool
from rlkit.rollout.collect import Collection, Collector, GroupLedger, ProgressCallback
from rlkit.rollout.debug_data import load_rollout, rollout_path, save_rollout
from rlkit.rollout.evaluate import Evaluator, load_eval_datasets
from rlkit.rollout.generator import Generator
from rlkit.rollout.hooks import RolloutHooks
from rlkit.rollout.job import RolloutJob, load_rollout_function, run_job
from rlkit.rollout.metrics import rollout_metrics
from rlkit.rollout.sampling import context_limit, rollout_sampling
from rlkit.rollout.select import Selection, Selector
from rlkit.rollout.source import GroupSource
from rlkit.rollout.training_batch import (
    build_shards,
    check_trainable,
    groups_by_rank,
    num_planned_samples,
    shaping_metrics,
    untrained_reason,
)
from rlkit.rollout.turns import CustomResponder
from rlkit.rollout.weight_versions import check_weight_versions
from rlkit.types.batches import Update
from rlkit.types.ranks import MetricSet
from rlkit.types.samples import SampleGroup

logger = logging.getLogger(__name__)

CONTROL_TIMEOUT_S = 10.0
"""For aborts, which an engine answers at once or not at all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutBatch:
    """What a step trains on."""

    shards: list[list[Update]]
    """[rank][optimizer step]."""
    metrics: MetricSet


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """The connections to router, engines and graders: what a run without engines does not have."""

    router: RouterClient
    engines: list[EngineClient]
    graders: GraderPool
    generator: Generator
    collector: Collector
    has_custom_reward: bool

    @classmethod
    def open(cls, cfg: RunConfig, tokenizer: Tokenizer, router_url: str, engine_urls: Sequence[str]) -> Self:
        concurrency = cfg.engine.sglang_server_concurrency * max(1, len(engine_urls))
        timeout_s = cfg.engine.engine_timeout_s
        router = RouterClient(router_url, timeout_s=timeout_s, max_connections=concurrency)
        engines = [EngineClient(url, timeout_s=CONTROL_TIMEOUT_S, max_connections=0) for url in engine_urls]
        graders = GraderPool(cfg.reward)
        generator = Generator(
            router,
            engines,
            concurrency=concurrency,
            max_context_len=context_limit(cfg),
            timeout_s=timeout_s,
            run_tag=secrets.token_hex(4),
            patience_s=2 * cfg.engine.engine_start_timeout_s if cfg.engine.use_fault_tolerance else 0.0,
            follows_versions=cfg.sync.pause_generation_mode == "retract",
        )
        path = cfg.rollout.custom_generate_function_path
        responder = CustomResponder(path, generator, tokenizer) if path is not None else None
        return cls(
            router=router,
            engines=engines,
            graders=graders,
            generator=generator,
            collector=Collector(generator, graders, responder=responder, group_rm=cfg.reward.group_rm),
            has_custom_reward=cfg.reward.custom_rm_path is not None,
        )

    def set_engines(self, engine_urls: Sequence[str]) -> None:
        """Where the engines are now: one that was restarted has another address."""
        kept = {client.url: client for client in self.engines}
        self.engines[:] = [kept.get(url) or EngineClient(url, timeout_s=CONTROL_TIMEOUT_S) for url in engine_urls]
        self.generator.set_engines(self.engines)

    async def start_graders(self) -> None:
        """Before anything is generated: a broken `--custom-rm-path` is a ConfigError now, not after minutes."""
        if self.has_custom_reward:
            await self.graders.start()

    async def close(self) -> None:
        await self.graders.aclose()
        for client in (self.router, *self.engines):
            await client.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Planned:
    """The rollout that was packed last, for the ledger."""

    step: int
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
        self._planned: _Planned | None = None
        self._ledger = Ledger(run_dir / "ledger.jsonl")
        self._tokenizer = load_tokenizer(cfg.model)
        self._eos_ids = eos_token_ids(cfg.model, self._tokenizer)
        self._hooks = RolloutHooks.load(cfg)
        self._rollout_function = load_rollout_function(cfg.rollout.rollout_function_path)
        self._source = None
        if cfg.debug.load_debug_rollout_data is None:
            self._source = GroupSource(cfg, PromptSource(cfg.data, self._tokenizer), self._ledger)
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
        groups, selection = await self._collect(step)
        collected = selection.collected
        if cfg.debug.save_debug_rollout_data is not None:
            save_rollout(rollout_path(cfg.debug.save_debug_rollout_data, step), step, groups)
        metrics = rollout_metrics(
            groups,
            seconds=collected.generate_s,
            num_reissued=collected.num_reissued,
            has_rewards=not cfg.is_sft,
            log_passrate=cfg.rollout.log_passrate,
        )
        if self._hooks.shape_rewards is not None and not cfg.is_sft:
            self._hooks.shape_rewards(groups)
        if self._hooks.leave_out is not None:
            self._hooks.leave_out(groups)
        self._record_kept(step, groups)
        check_trainable(groups, collected, step=step, require_reward=not cfg.is_sft)
        if self._serving is not None:
            await check_weight_versions(groups, self._serving.engines, trainer_version=step)
        with self._spans(SpanName.PACK):
            shards = build_shards(cfg, groups, self._dp)
            self._planned = _Planned(
                step=step, groups=groups_by_rank(groups, shards), num_samples=num_planned_samples(shards)
            )
        metrics |= shaping_metrics(cfg, groups)
        if self._source is not None and self._serving is not None:
            metrics |= selection.metrics(self._source.num_waiting)
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

    def record_trained(self, step: int) -> None:
        """Note which groups each rank has trained on; called when the optimizer steps of the rollout are done."""
        assert self._planned is not None and self._planned.step == step, f"step {step} is not the rollout made last"
        self._ledger.write_together(
            LedgerEvent.TRAINED,
            [
                {"step": step, "rank": rank, "groups": group_ids, "step_samples": self._planned.num_samples}
                for rank, group_ids in enumerate(self._planned.groups)
            ],
        )
        self._planned = None

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON: the place in the prompt file, the next group id, the groups that wait."""
        return self._source.state() if self._source is not None else {"prompts": None, "next_group_id": 0}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue where `state()` was taken. A replay has no place in a prompt file."""
        if self._source is not None and state["prompts"] is not None:
            self._source.load_state(state)

    async def close(self) -> None:
        if self._evaluator is not None:
            await self._evaluator.close()
        if self._serving is not None:
            await self._serving.close()
        self._ledger.close()

    # ---- where samples come from -----------------------------------------------------------------------------------

    async def _collect(self, step: int) -> tuple[list[SampleGroup], Selection]:
        if self._cfg.debug.load_debug_rollout_data is not None:
            _, groups = load_rollout(rollout_path(self._cfg.debug.load_debug_rollout_data, step))
            return groups, Selection()
        assert self._source is not None
        events = GroupLedger(self._ledger, step)
        if self._serving is None:
            return self._supervised_groups(self._source, events, step), Selection()
        await self._serving.start_graders()
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
        for group in groups:
            events.issued(group)
            for sample in group.samples:
                fill_in_label(sample, group.prompt, self._tokenizer)
        return groups

    def _record_kept(self, step: int, groups: Sequence[SampleGroup]) -> None:
        """KEPT for groups of which a sample trains; DROPPED, with the reason, for what is left out."""
        left_out: Counter[str] = Counter()
        for group in groups:
            reasons = [untrained_reason(s, require_reward=not self._cfg.is_sft) for s in group.samples]
            dropped: dict[str, list[int]] = {}
            for index, reason in enumerate(reasons):
                if reason is not None:
                    dropped.setdefault(reason, []).append(index)
            if None in reasons:
                self._ledger.write(LedgerEvent.KEPT, step=step, group=group.group_id)
            for reason, indices in dropped.items():
                left_out[reason] += len(indices)
                which = {"indices": indices} if len(indices) < len(reasons) else {}
                self._ledger.write(LedgerEvent.DROPPED, step=step, group=group.group_id, reason=reason, **which)
        if left_out:
            told = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
            logger.warning(f"step {step}: samples left out of training: {told}")
