"""A step by a function of the user (`--rollout-function-path`): it draws groups, generates and grades them, and returns
those to train on. Called by `manager.py`.
"""

from collections.abc import Awaitable, Callable, Sequence

from rlkit.config.hooks import HOOKS, load_function
from rlkit.config.schema import RunConfig
from rlkit.rollout.collect import Collection, GroupLedger
from rlkit.rollout.hooks import HookError, WaitingGroup
from rlkit.rollout.select import Selection
from rlkit.rollout.source import GroupSource
from rlkit.types.samples import SampleGroup


class RolloutJob:
    """One step, as the function sees it."""

    def __init__(
        self, cfg: RunConfig, source: GroupSource, collection: Collection, ledger: GroupLedger, *, step: int
    ) -> None:
        self.cfg = cfg
        self.step = step
        self._source = source
        self._collection = collection
        self._ledger = ledger
        self._held: dict[int, WaitingGroup] = {}
        self.num_tried = 0

    def next_groups(self, num_groups: int) -> list[SampleGroup]:
        """Groups that wait since an earlier step, then new prompts. The rest is dropped in the end."""
        batch = self._source.next(num_groups, self.step)
        for item in batch:
            if item.first_step == self.step:
                self._ledger.issued(item.group)
            self._held[item.group.group_id] = item
        self.num_tried += len(batch)
        return [item.group for item in batch]

    async def run(self, groups: Sequence[SampleGroup]) -> None:
        """Generate and grade every sample of the groups."""
        self._collection.start(groups)
        for _ in groups:
            await self._collection.next_finished()

    def put_back(self, groups: Sequence[SampleGroup]) -> None:
        """Keep groups for a later step; with their tokens if `--partial-rollout` is on."""
        items = [self._held.pop(group.group_id) for group in groups]
        for item in items:
            self._ledger.buffered(item.group, "put_back")
        self._source.put_back(items)

    def settle(self, groups: object, path: str) -> Selection:
        """Check what the function returned, and account for the rest."""
        wanted = self.cfg.rollout.rollout_batch_size
        is_list = isinstance(groups, list) and all(isinstance(group, SampleGroup) for group in groups)
        ids = [group.group_id for group in groups] if is_list else []  # type: ignore[union-attr]
        if len(ids) != wanted or len(set(ids)) != wanted or not set(ids) <= self._held.keys():
            raise HookError(
                f"--rollout-function-path {path} must return a list of {wanted} (--rollout-batch-size) different "
                f"groups that job.next_groups gave it; it returned {ids if is_list else str(groups)[:200]}"
            )
        selection = Selection(num_tried=self.num_tried, collected=self._collection.finish())
        chosen = [self._held.pop(number) for number in ids]
        for item in self._held.values():
            selection.dropped["rollout_function"] += 1
            self._ledger.dropped(item.group, "rollout_function")
        selection.groups = sorted((item.group for item in chosen), key=lambda group: group.group_id)
        selection.num_continued = sum(item.num_continued > 0 for item in chosen)
        return selection


RolloutFunction = Callable[[RolloutJob], Awaitable[list[SampleGroup]]]


def load_rollout_function(path: str | None) -> RolloutFunction | None:
    """ConfigError, with the right signature, where it cannot be used."""
    return None if path is None else load_function(HOOKS["rollout_function_path"], path)


async def run_job(function: RolloutFunction, job: RolloutJob, collection: Collection, path: str) -> Selection:
    """Call the function. Its own errors end the run: a step without a batch cannot go on."""
    try:
        groups = await function(job)
    except BaseException:
        await collection.stop(grace_s=0.0)
        raise
    await collection.stop()
    return job.settle(groups, path)
