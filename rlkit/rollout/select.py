"""Dynamic sampling: groups are started, judged as they finish, and the moment enough are kept the rest is cut off.

The scheme of DAPO (arXiv:2503.14476, section 3.2). A plain rollout is the case in which every group is kept. Called by
`manager.py`.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rlkit.config.schema import RunConfig
from rlkit.rollout.collect import Collected, Collection, GroupLedger
from rlkit.rollout.hooks import FilterVerdict, GroupFilter, WaitingGroup
from rlkit.rollout.metrics import DROP_METRIC
from rlkit.rollout.source import GroupSource
from rlkit.types.errors import DataError, EngineError
from rlkit.types.ranks import MetricSet
from rlkit.types.samples import SampleGroup, SampleStatus

AllSamplesProcess = Callable[[list[SampleGroup], int], None]


@dataclass(kw_only=True, slots=True)
class Selection:
    """The groups of a step, and what became of the others."""

    groups: list[SampleGroup] = field(default_factory=list[SampleGroup])
    """As many as `--rollout-batch-size`, in the order of their ids."""
    collected: Collected = field(default_factory=Collected)
    num_tried: int = 0
    num_continued: int = 0
    """Groups of `groups` that an earlier step began."""
    num_cut_off: int = 0
    dropped: Counter[str] = field(default_factory=Counter[str])
    """Reason -> groups."""

    def metrics(self, num_waiting: int) -> MetricSet:
        """`rollout/groups_...` and a count for each reason to drop."""
        counts: MetricSet = {
            "rollout/groups_tried": self.num_tried,
            "rollout/groups_dropped": self.dropped.total(),
            "rollout/groups_cut_off": self.num_cut_off,
            "rollout/groups_continued": self.num_continued,
            "rollout/groups_waiting": num_waiting,
        }
        return counts | {f"{DROP_METRIC}{reason}": count for reason, count in self.dropped.items()}


class Selector:
    """Chooses the groups of one step. Made anew for each."""

    def __init__(
        self,
        cfg: RunConfig,
        source: GroupSource,
        *,
        step: int,
        group_filter: GroupFilter | None,
        ledger: GroupLedger,
        process_all: AllSamplesProcess | None = None,
    ) -> None:
        """Without a `group_filter` every group is kept. `process_all` sees what finished, filtered or not."""
        self._cfg = cfg
        self._source = source
        self._step = step
        self._filter = group_filter
        self._ledger = ledger
        self._process_all = process_all
        self._wanted = cfg.rollout.rollout_batch_size
        self._running: dict[int, WaitingGroup] = {}
        self._kept: list[WaitingGroup] = []
        self._cut_off: list[WaitingGroup] = []
        self._reserve: list[tuple[WaitingGroup, FilterVerdict]] = []
        self._finished: list[SampleGroup] = []
        self._selection = Selection()

    async def select(self, collection: Collection) -> Selection:
        """The groups of the step.

        Groups that are cut off go back to the source. DataError (EngineError, if engines failed) when
        `--dynamic-sampling-max-groups` groups did not hold enough to keep.
        """
        try:
            while True:
                self._start_enough(collection)
                if len(self._kept) >= self._wanted and not any(map(self._must_finish, self._running.values())):
                    break
                if not self._running:
                    raise self._exhausted(collection)
                self._judge(await collection.next_finished())
        except BaseException:
            await collection.stop(grace_s=0.0)
            raise
        await collection.stop()
        return self._settle(collection)

    def _start_enough(self, collection: Collection) -> None:
        """Until those that are kept and those that run could fill the batch, if the bound allows."""
        while (missing := self._wanted - len(self._kept) - len(self._running)) > 0:
            if self._reserve:
                self._kept += [item for item, _ in self._reserve[:missing]]
                del self._reserve[:missing]
                continue
            room = self._cfg.max_groups_tried - self._selection.num_tried
            if room <= 0:
                return
            batch = self._source.next(min(self._cfg.over_sampling_batch_size, room), self._step)
            for item in batch:
                if item.first_step == self._step:
                    self._ledger.issued(item.group)
                self._running[item.group.group_id] = item
            self._selection.num_tried += len(batch)
            collection.start([item.group for item in batch])

    def _judge(self, group: SampleGroup) -> None:
        item = self._running.pop(group.group_id)
        if self._cfg.rollout.partial_rollout and any(s.status is SampleStatus.ABORTED for s in group.samples):
            self._cut_off.append(item)  # by someone else, such as a weight update
            return
        self._finished.append(group)
        verdict = FilterVerdict(keep=True) if self._filter is None else self._filter(group)
        if verdict.keep:
            self._kept.append(item)
        elif verdict.keep_when_insufficient:
            self._reserve.append((item, verdict))
        else:
            self._drop(item, verdict)

    def _must_finish(self, item: WaitingGroup) -> bool:
        limit = self._cfg.rollout.partial_rollout_max_continuations
        return limit is not None and item.num_continued >= limit

    def _drop(self, item: WaitingGroup, verdict: FilterVerdict) -> None:
        reason = verdict.reason or "filtered"
        self._selection.dropped[reason] += 1
        self._ledger.dropped(item.group, reason)

    def _settle(self, collection: Collection) -> Selection:
        """Whoever waited longest is trained on first; what is over goes back to the source."""
        self._kept.sort(key=lambda item: (item.first_step, item.group.group_id))
        taken, over = self._kept[: self._wanted], self._kept[self._wanted :]
        cut_off = [*over, *self._cut_off, *self._running.values()]
        for item, verdict in self._reserve:
            self._drop(item, verdict)
        for item in cut_off:
            self._ledger.buffered(item.group, "continue" if self._cfg.rollout.partial_rollout else "start_anew")
        self._source.put_back(cut_off)
        if self._process_all is not None:
            self._process_all(self._finished, self._step)
        selection = self._selection
        selection.groups = sorted((item.group for item in taken), key=lambda group: group.group_id)
        selection.num_continued = sum(item.num_continued > 0 for item in taken)
        selection.num_cut_off = len(cut_off)
        selection.collected = collection.finish()
        return selection

    def _exhausted(self, collection: Collection) -> DataError | EngineError:
        return nothing_left_to_keep(
            self._cfg,
            self._step,
            self._finished,
            self._selection.dropped,
            num_kept=len(self._kept),
            engine_error=collection.finish().engine_error,
        )


def nothing_left_to_keep(
    cfg: RunConfig,
    step: int,
    finished: Sequence[SampleGroup],
    dropped: Counter[str],
    *,
    num_kept: int,
    engine_error: str | None,
) -> DataError | EngineError:
    """The end of a run whose step tried as many groups as it may. `finished` are those of the step."""
    why = ", ".join(f"{count} {reason}" for reason, count in dropped.most_common())
    start = (
        f"step {step}: of {num_kept + dropped.total()} groups tried only {num_kept} were kept, "
        f"{cfg.rollout.rollout_batch_size} (--rollout-batch-size) are wanted. Dropped: {why or 'none'}"
    )
    failed = sum(s.status is SampleStatus.FAILED for group in finished for s in group.samples)
    if failed:
        return EngineError(f"{start}. {failed} samples failed; the last engine error: {str(engine_error)[:300]}")
    fallback = (
        ""
        if cfg.async_training.is_full
        else ("take --dynamic-sampling-filter-path check_reward_nonzero_std_with_fallback, ")
    )
    return DataError(
        f"{start}. Raise --dynamic-sampling-max-groups ({cfg.max_groups_tried}), {fallback}or choose prompts that the "
        "model sometimes gets right and sometimes wrong"
    )
