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
from rlkit.data.tokenizer import eos_token_ids, load_tokenizer
from rlkit.engines.client import EngineClient, RouterClient
from rlkit.observability.ledger import Ledger, LedgerEvent
from rlkit.observability.spans import SpanName, Spans
from rlkit.rewards.pool import GraderPool
from rlkit.rollout.collect import Collected, Collector, GroupLedger, ProgressCallback, open_group
from rlkit.rollout.debug_data import load_rollout, rollout_path, save_rollout
from rlkit.rollout.evaluate import EvalDataset, evaluate, load_eval_datasets
from rlkit.rollout.generator import Generator
from rlkit.rollout.metrics import rollout_metrics
from rlkit.rollout.sampling import context_limit, eval_sampling, rollout_sampling
from rlkit.rollout.training_batch import build_shards, check_trainable, groups_by_rank, untrained_reason
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
    collector: Collector
    has_custom_reward: bool

    @classmethod
    def open(cls, cfg: RunConfig, router_url: str, engine_urls: Sequence[str]) -> Self:
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
        )
        return cls(
            router=router,
            engines=engines,
            graders=graders,
            collector=Collector(generator, graders),
            has_custom_reward=cfg.reward.custom_rm_path is not None,
        )

    async def start_graders(self) -> None:
        """Before anything is generated: a broken `--custom-rm-path` is a ConfigError now, not after minutes."""
        if self.has_custom_reward:
            await self.graders.start()

    async def close(self) -> None:
        self.graders.close()
        for client in (self.router, *self.engines):
            await client.close()


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
        self._next_group_id = 0
        self._planned: tuple[int, list[list[int]]] | None = None
        self._ledger = Ledger(run_dir / "ledger.jsonl")
        self._tokenizer = load_tokenizer(cfg.model)
        self._eos_ids = eos_token_ids(cfg.model, self._tokenizer)
        self._prompts = None
        if cfg.debug.load_debug_rollout_data is None:
            self._prompts = PromptSource(cfg.data, self._tokenizer)
        self._serving = None
        if cfg.starts_engines:
            assert router_url is not None and engine_urls, "this config starts engines, so there are addresses"
            self._serving = Serving.open(cfg, router_url, engine_urls)
        self._eval_datasets: list[EvalDataset] = []
        if cfg.evaluation.eval_interval is not None:
            if self._serving is not None:
                self._eval_datasets = load_eval_datasets(cfg, self._tokenizer)
            else:
                logger.warning(
                    "no engines, so --eval-interval has no effect: SFT and replayed rollouts evaluate nothing"
                )

    async def generate(self, step: int) -> RolloutBatch:
        """The rollout of one step, packed for every rank.

        Raises EngineError, RewardError or DataError, with what was seen, if nothing in it can be trained on.
        """
        cfg = self._cfg
        groups, collected = await self._collect(step)
        if cfg.debug.save_debug_rollout_data is not None:
            save_rollout(rollout_path(cfg.debug.save_debug_rollout_data, step), step, groups)
        self._record_kept(step, groups)
        check_trainable(groups, collected, step=step, require_reward=not cfg.is_sft)
        with self._spans(SpanName.PACK):
            shards = build_shards(cfg, groups, self._dp)
            self._planned = (step, groups_by_rank(groups, shards))
        metrics = rollout_metrics(
            groups, seconds=collected.generate_s, num_reissued=collected.num_reissued, has_rewards=not cfg.is_sft
        )
        metrics |= {f"grader/{name}": float(count) for name, count in collected.grader_counts.items()}
        return RolloutBatch(shards=shards, metrics=metrics)

    async def evaluate(self, step: int) -> MetricSet:
        """`eval/...` of the weights that the engines hold; empty without engines."""
        if self._serving is None:
            return {}
        with self._spans(SpanName.EVALUATE):
            await self._serving.start_graders()
            return await evaluate(
                self._eval_datasets,
                self._serving.collector,
                eval_sampling(self._cfg, self._eos_ids),
                num_samples=self._cfg.evaluation.n_samples_per_eval_prompt,
                run_seed=self._cfg.data.rollout_seed,
                on_progress=self._on_progress,
            )

    def record_trained(self, step: int) -> None:
        """Note which groups each rank has trained on; called when the optimizer steps of the rollout are done."""
        assert self._planned is not None and self._planned[0] == step, f"step {step} is not the rollout made last"
        for rank, group_ids in enumerate(self._planned[1]):
            self._ledger.write(LedgerEvent.TRAINED, step=step, rank=rank, groups=group_ids)
        self._planned = None

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON: the place in the prompt file and the next group id."""
        prompts = self._prompts.state() if self._prompts is not None else None
        return {"prompts": prompts, "next_group_id": self._next_group_id}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue where `state()` was taken. A replay has no place in a prompt file."""
        if self._prompts is not None and state["prompts"] is not None:
            self._prompts.load_state(state["prompts"])
        self._next_group_id = state["next_group_id"]

    async def close(self) -> None:
        if self._serving is not None:
            await self._serving.close()
        self._ledger.close()

    # ---- where samples come from -----------------------------------------------------------------------------------

    async def _collect(self, step: int) -> tuple[list[SampleGroup], Collected]:
        if self._cfg.debug.load_debug_rollout_data is not None:
            _, groups = load_rollout(rollout_path(self._cfg.debug.load_debug_rollout_data, step))
            return groups, Collected()
        events = GroupLedger(self._ledger, step)
        groups = self._next_groups()
        for group in groups:
            events.issued(group)
        if self._serving is None:
            for group in groups:
                for sample in group.samples:
                    fill_in_label(sample, group.prompt, self._tokenizer)
            return groups, Collected()
        await self._serving.start_graders()
        collected = await self._serving.collector.collect(
            groups,
            rollout_sampling(self._cfg, self._eos_ids),
            evaluation=False,
            on_progress=self._on_progress,
            ledger=events,
        )
        self._spans.add(SpanName.GENERATE, collected.generate_s)
        self._spans.add(SpanName.GRADE, collected.grade_s)
        return groups, collected

    def _next_groups(self) -> list[SampleGroup]:
        assert self._prompts is not None
        rollout = self._cfg.rollout
        groups = []
        for prompt in self._prompts.next(rollout.rollout_batch_size):
            seed = self._cfg.data.rollout_seed
            groups.append(open_group(prompt, self._next_group_id, rollout.n_samples_per_prompt, run_seed=seed))
            self._next_group_id += 1
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
