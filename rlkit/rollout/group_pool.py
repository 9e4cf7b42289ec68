"""Generation that never stops (`--async-mode full`): a bounded pool of groups, of which each step takes a batch.

    prompts -> dispatch (pool_capacity) -> running -> filter -> finished -> take (oldest first) -> training
                  ^                                    |                      |
                  '------------ a place is free <------+-------- too stale <--'

Weights change while groups run; what that means for their age is in `staleness.py`. Called by `manager.py`, driven by
one event loop. Invariant: every group that was issued is running, finished, taken, or dropped with a reason in the
ledger; `held()` lists the first two for a checkpoint.
"""

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rlkit.config.schema import RunConfig
from rlkit.rollout.collect import Collected, GroupLedger, ProgressCallback
from rlkit.rollout.hooks import GroupFilter, WaitingGroup
from rlkit.rollout.select import AllSamplesProcess, Selection, nothing_left_to_keep
from rlkit.rollout.staleness import must_wait, oldest_version, pool_capacity
from rlkit.types.samples import SampleGroup

TOO_STALE = "too_stale"
RUN_ENDED = "run_ended"


class GroupStream(Protocol):
    """What the pool needs of `collect.Collection`."""

    def start(self, groups: Sequence[SampleGroup]) -> None: ...

    async def next_finished(self) -> SampleGroup: ...

    async def stop(self, *, grace_s: float) -> None: ...

    def finish(self) -> Collected: ...


class GroupDraws(Protocol):
    """What the pool needs of `source.GroupSource`."""

    def next(self, num_groups: int, step: int) -> list[WaitingGroup]: ...


@dataclass(kw_only=True, slots=True)
class _Pooled:
    item: WaitingGroup
    version: int
    """Of the weights that the engines held when it was started: no token is older. Once it is finished, of its oldest
    trained token."""

    @property
    def order(self) -> tuple[int, int]:
        return self.version, self.item.group.group_id


class GroupPool:
    """Groups in flight across steps. Dispatch goes on in the background from the first `take` until `stop`."""

    def __init__(
        self,
        cfg: RunConfig,
        source: GroupDraws,
        stream: GroupStream,
        ledger: GroupLedger,
        *,
        engine_version: int,
        group_filter: GroupFilter | None = None,
        process_all: AllSamplesProcess | None = None,
        on_progress: ProgressCallback | None = None,
    ) -> None:
        """`ledger` writes the events of `stream`, too; its step is the one that was taken last. `on_progress` hears of
        finished samples since the last batch."""
        self._cfg = cfg
        self._source = source
        self._stream = stream
        self._ledger = ledger
        self._filter = group_filter
        self._process_all = process_all
        self._on_progress = on_progress
        self._engine_version = engine_version
        self._next_step = ledger.step
        self._running: dict[int, _Pooled] = {}
        self._finished: list[_Pooled] = []
        self._judged: list[SampleGroup] = []
        self._dropped: Counter[str] = Counter()
        self._changed = asyncio.Event()
        self._pump: asyncio.Task[None] | None = None
        self._collected_before = Collected()
        self._taken_at = time.perf_counter()

    def __len__(self) -> int:
        return len(self._running) + len(self._finished)

    def set_engine_version(self, version: int) -> None:
        """The engines have newer weights now, so more groups may be started."""
        self._engine_version = version
        if self._pump is not None:
            self._dispatch()

    async def take(self, step: int) -> Selection:
        """The batch of `step`: `--rollout-batch-size` finished groups, those of the oldest weights first.

        Raises what went wrong in the background since the last call, and DataError where
        `--dynamic-sampling-max-groups` groups were dropped by the filter before a batch was there.
        """
        assert step == self._next_step, f"step {self._next_step} comes next, not {step}"
        if self._pump is None:
            self._taken_at = time.perf_counter()
            self._pump = asyncio.create_task(self._run())
            self._pump.add_done_callback(lambda _: self._changed.set())
        while True:
            if self._pump.done():
                self._pump.result()
            self._changed.clear()
            self._drop_stale()
            self._dispatch()
            if (batch := self._ready_batch()) is not None:
                break
            if self._dropped.total() - self._dropped[TOO_STALE] >= self._cfg.max_groups_tried:
                raise nothing_left_to_keep(
                    self._cfg,
                    step,
                    self._judged,
                    self._dropped,
                    num_kept=len(self._finished),
                    engine_error=self._stream.finish().engine_error,
                )
            await self._changed.wait()
        chosen = {id(pooled) for pooled in batch}
        self._finished = [pooled for pooled in self._finished if id(pooled) not in chosen]
        selection = self._settle(batch, step)
        self._next_step = step + 1
        self._ledger.step = step
        self._dispatch()
        return selection

    def held(self) -> list[WaitingGroup]:
        """Every group in the pool; which of them are finished, their samples say."""
        pooled = [*self._finished, *self._running.values()]
        return [p.item for p in sorted(pooled, key=lambda p: p.item.group.group_id)]

    async def stop(self) -> None:
        """End everything that runs; the ledger says of each group that is left that the run ended before it."""
        if self._pump is None:
            return
        self._pump.cancel()
        await asyncio.wait([self._pump])
        for item in self.held():  # before anything that can take long: the process may be killed meanwhile
            self._ledger.buffered(item.group, RUN_ENDED)
        await self._stream.stop(grace_s=0.0)

    # ---- the background ------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            group = await self._stream.next_finished()
            self._judge(group)
            self._dispatch()
            if self._on_progress is not None:
                size = self._cfg.rollout.n_samples_per_prompt
                wanted = self._cfg.rollout.rollout_batch_size
                self._on_progress(len(self._judged) * size, max(wanted, len(self._judged)) * size)
            self._changed.set()

    def _dispatch(self) -> None:
        """Start as many groups as the bound on staleness allows."""
        capacity = pool_capacity(
            max_staleness=self._cfg.async_training.staleness_limit,
            batch_size=self._cfg.rollout.rollout_batch_size,
            next_step=self._next_step,
            engine_version=self._engine_version,
        )
        free = capacity - len(self)
        if free <= 0:
            return
        items = self._source.next(free, self._ledger.step)
        for item in items:
            if item.first_step == self._ledger.step:
                self._ledger.issued(item.group, is_pooled=True)
            self._running[item.group.group_id] = _Pooled(item=item, version=self._engine_version)
        self._stream.start([item.group for item in items])

    def _judge(self, group: SampleGroup) -> None:
        pooled = self._running.pop(group.group_id)
        self._judged.append(group)
        verdict = None if self._filter is None else self._filter(group)
        if verdict is not None and not verdict.keep:
            self._drop(pooled, verdict.reason or "filtered")
            return
        oldest = oldest_version(group.samples)
        pooled.version = pooled.version if oldest is None else oldest
        self._finished.append(pooled)

    def _drop(self, pooled: _Pooled, reason: str) -> None:
        self._dropped[reason] += 1
        self._ledger.dropped(pooled.item.group, reason)

    # ---- a step's batch ------------------------------------------------------------------------------------------

    def _drop_stale(self) -> None:
        """Waiting can no longer help a finished group that is too stale; only `downweight` trains on it."""
        if self._cfg.async_training.stale_groups == "downweight":
            return
        oldest_allowed = self._next_step - self._cfg.async_training.staleness_limit
        for pooled in [pooled for pooled in self._finished if pooled.version < oldest_allowed]:
            self._finished.remove(pooled)
            self._drop(pooled, TOO_STALE)

    def _ready_batch(self) -> list[_Pooled] | None:
        """The oldest finished groups, if there are enough and no running one has to come first."""
        size = self._cfg.rollout.rollout_batch_size
        ordered = sorted(self._finished, key=lambda pooled: pooled.order)
        if len(ordered) < size:
            return None
        if self._cfg.async_training.stale_groups == "wait":
            limit = self._cfg.async_training.staleness_limit
            running = list(self._running.values())
            left = [*ordered[size:], *running]
            deadlines = [pooled.version + limit for pooled in left]
            is_running = [False] * len(ordered[size:]) + [True] * len(running)
            if must_wait(deadlines, is_running, next_step=self._next_step + 1, batch_size=size):
                return None
        return ordered[:size]

    def _settle(self, batch: Sequence[_Pooled], step: int) -> Selection:
        if self._process_all is not None:
            self._process_all(self._judged, step)
        selection = Selection(
            groups=sorted((pooled.item.group for pooled in batch), key=lambda group: group.group_id),
            collected=self._since_last_batch(),
            num_tried=len(self._judged),
            num_continued=sum(pooled.item.num_continued > 0 for pooled in batch),
            dropped=self._dropped,
        )
        self._judged, self._dropped = [], Counter()
        return selection

    def _since_last_batch(self) -> Collected:
        now, total = time.perf_counter(), dataclasses.replace(self._stream.finish())
        before, self._collected_before = self._collected_before, total
        seconds, self._taken_at = now - self._taken_at, now
        return Collected(
            generate_s=seconds,
            num_reissued=total.num_reissued - before.num_reissued,
            engine_error=total.engine_error,
            grade_error=total.grade_error,
            grader_counts={
                name: count - before.grader_counts.get(name, 0) for name, count in total.grader_counts.items()
            },
        )
