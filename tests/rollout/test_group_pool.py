"""The pool of `--async-mode full` without clock, engines or threads: the test says which group finishes, and when
weights change."""

import asyncio
import random
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rlkit.config.schema import AsyncConfig, RolloutConfig, RunConfig
from rlkit.observability.ledger import Ledger, LedgerEvent, read_ledger
from rlkit.rollout.collect import Collected, GroupLedger
from rlkit.rollout.group_pool import GroupPool
from rlkit.rollout.hooks import FilterVerdict, WaitingGroup
from rlkit.rollout.select import Selection
from rlkit.rollout.staleness import oldest_version
from rlkit.types.errors import DataError, EngineError
from rlkit.types.samples import Prompt, Sample, SampleGroup, SampleStatus

BATCH = 2


@dataclass
class Draws:
    """Groups without end, numbered."""

    next_id: int = 0

    def next(self, num_groups: int, step: int) -> list[WaitingGroup]:
        items = []
        for number in range(self.next_id, self.next_id + num_groups):
            prompt = Prompt(position=number, epoch=0, token_ids=[1], text="")
            made = Sample(group_id=number, index=0, seed=number, tokens=[1], prompt_length=1)
            items.append(
                WaitingGroup(group=SampleGroup(group_id=number, prompt=prompt, samples=[made]), first_step=step)
            )
        self.next_id += num_groups
        return items


@dataclass
class Stream:
    """Runs nothing: `finish_group(number)` is the end of a group."""

    running: dict[int, SampleGroup] = field(default_factory=dict)
    version: int = 0
    queue: asyncio.Queue[SampleGroup | BaseException] = field(default_factory=asyncio.Queue)
    is_stopped: bool = False

    def start(self, groups: Sequence[SampleGroup]) -> None:
        for group in groups:
            (sample,) = group.samples
            sample.weight_versions, sample.version_starts = [self.version], [0]
            self.running[group.group_id] = group

    def finish_group(self, number: int, status: SampleStatus = SampleStatus.COMPLETED) -> None:
        group = self.running.pop(number)
        (sample,) = group.samples
        sample.tokens.append(5)
        sample.loss_mask, sample.rollout_logprobs = [1], [-1.0]
        sample.status, sample.reward = status, 1.0
        self.queue.put_nowait(group)

    def update(self, version: int) -> None:
        self.version = version

    async def next_finished(self) -> SampleGroup:
        item = await self.queue.get()
        if isinstance(item, BaseException):
            raise item
        return item

    async def stop(self, *, grace_s: float) -> None:
        self.is_stopped = True

    def finish(self) -> Collected:
        return Collected()


class World:
    """A pool, and a trainer that the test plays."""

    def __init__(self, path: Path, *, first_step: int = 0, group_filter: Any = None, **options: Any) -> None:
        rollout = RolloutConfig(
            rollout_batch_size=BATCH,
            n_samples_per_prompt=1,
            dynamic_sampling_max_groups=options.pop("max_groups", None),
        )
        cfg = RunConfig(rollout=rollout, async_training=AsyncConfig(async_mode="full", **options))
        self.ledger_path = path / "ledger.jsonl"
        self.ledger = Ledger(self.ledger_path)
        self.stream, self.draws = Stream(version=first_step), Draws()
        self.step = first_step
        self.pool = GroupPool(
            cfg,
            self.draws,
            self.stream,
            GroupLedger(self.ledger, first_step),
            engine_version=first_step,
            group_filter=group_filter,
        )
        self.taken: dict[int, list[int]] = {}

    async def settle(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    async def finish(self, *numbers: int) -> None:
        for number in numbers:
            self.stream.finish_group(number)
        await self.settle()

    def asked(self) -> asyncio.Task[Selection]:
        return asyncio.create_task(self.pool.take(self.step))

    async def take(self) -> Selection:
        """A batch that is ready."""
        task = self.asked()
        await self.settle()
        assert task.done(), "the batch is not ready"
        return self.note(task.result())

    def note(self, selection: Selection) -> Selection:
        self.taken[self.step] = [group.group_id for group in selection.groups]
        self.step += 1
        return selection

    async def update(self, version: int) -> None:
        self.stream.update(version)
        self.pool.set_engine_version(version)
        await self.settle()

    def dropped(self) -> dict[int, str]:
        events = [r for r in read_ledger(self.ledger_path) if r.event is LedgerEvent.DROPPED]
        return {r.fields["group"]: r.fields["reason"] for r in events}


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, timeout=30))


def test_dispatch_is_bounded_by_staleness_at_every_moment(tmp_path: Path):
    async def main() -> None:
        world = World(tmp_path, max_staleness=1)
        first = world.asked()
        await world.settle()
        assert sorted(world.stream.running) == [0, 1, 2, 3], "(1 + 1) batches, and not one group more"
        await world.finish(0, 1)
        world.note(await first)
        assert sorted(world.stream.running) == [2, 3], "step 0 trains, engines are at v0: these are for step 1"
        await world.finish(2, 3)
        await world.settle()
        assert world.draws.next_id == 4, "a group for step 2 would be two versions old by then"
        await world.update(1)
        assert sorted(world.stream.running) == [4, 5]
        await world.take()
        assert sorted(world.stream.running) == [4, 5], "those were for step 2; step 3 has to wait for v2"

    run(main())


def test_without_staleness_nothing_runs_while_the_trainer_works(tmp_path: Path):
    async def main() -> None:
        world = World(tmp_path, max_staleness=0)
        first = world.asked()
        await world.settle()
        await world.finish(0, 1)
        world.note(await first)
        assert not world.stream.running and len(world.pool) == 0
        await world.update(1)
        assert sorted(world.stream.running) == [2, 3]

    run(main())


def test_a_straggler_is_waited_for_before_it_is_too_stale(tmp_path: Path):
    async def main() -> None:
        world = World(tmp_path, max_staleness=1, stale_groups="wait")
        first = world.asked()
        await world.settle()
        await world.finish(1, 2, 3)
        world.note(await first)
        assert world.taken[0] == [1, 2], "nothing is waited for as long as there is time"
        await world.update(1)
        await world.finish(4)
        second = world.asked()
        await world.settle()
        assert not second.done(), "3 and 4 are there, but group 0 of v0 has to be trained on at step 1 at the latest"
        await world.finish(0)
        assert world.note(await second).groups[0].group_id == 0
        assert world.dropped() == {}

    run(main())


def test_a_straggler_is_dropped_and_counted(tmp_path: Path):
    async def main() -> None:
        world = World(tmp_path, max_staleness=1, stale_groups="drop")
        first = world.asked()
        await world.settle()
        await world.finish(1, 2, 3)
        world.note(await first)
        await world.update(1)
        await world.finish(4)
        await world.take()
        assert world.taken[1] == [3, 4]
        await world.update(2)
        await world.finish(0, 5)
        third = world.asked()
        await world.settle()
        assert world.dropped() == {0: "too_stale"} and not third.done()
        await world.finish(6)
        selection = world.note(await third)
        assert selection.dropped == {"too_stale": 1}
        assert selection.metrics(0)["rollout/dynamic_filter/drop_too_stale"] == 1

    run(main())


def test_a_straggler_may_be_trained_on_with_less_weight(tmp_path: Path):
    async def main() -> None:
        world = World(tmp_path, max_staleness=1, stale_groups="downweight")
        first = world.asked()
        await world.settle()
        await world.finish(1, 2, 3)
        world.note(await first)
        await world.update(1)
        await world.finish(4)
        await world.take()
        await world.update(2)
        await world.finish(0, 5)
        await world.take()
        assert world.taken[2] == [0, 5] and world.dropped() == {}

    run(main())


@pytest.mark.parametrize("policy", ["wait", "drop"])
@pytest.mark.parametrize("limit", [0, 1, 2, 3])
@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_no_group_is_ever_trained_too_late_whatever_finishes_when(
    tmp_path: Path, policy: str, limit: int, interval: int, seed: int
):
    """Random ends of groups over 40 steps. `wait` loses no group; both keep the bound; neither gets stuck."""
    if limit < interval - 1:
        pytest.skip("a rule refuses it")
    rng = random.Random(seed)

    async def main() -> None:
        world = World(tmp_path, max_staleness=limit, stale_groups=policy)
        num_overlapping = 0
        for step in range(40):
            task = world.asked()
            await world.settle()
            while not task.done():
                assert world.stream.running, "nothing runs and no batch is there: stuck"
                some = sorted(world.stream.running)
                # stragglers: the oldest finish rarely
                weights = [1 if number == some[0] else 6 for number in some]
                await world.finish(rng.choices(some, weights)[0])
            selection = world.note(task.result())
            for group in selection.groups:
                oldest = oldest_version(group.samples)
                assert oldest is not None and 0 <= step - oldest <= limit
            num_overlapping += len(world.stream.running) > 0
            for number in rng.sample(sorted(world.stream.running), rng.randint(0, len(world.stream.running) // 2)):
                await world.finish(number)
            if (step + 1) % interval == 0:
                await world.update(step + 1)
        trained = [number for numbers in world.taken.values() for number in numbers]
        assert len(trained) == len(set(trained)) == 40 * BATCH
        left = {item.group.group_id for item in world.pool.held()}
        assert left | set(trained) | set(world.dropped()) == set(range(world.draws.next_id)), "none is lost"
        if policy == "wait":
            assert world.dropped() == {}
        assert num_overlapping > 0 or limit == 0
        await world.pool.stop()

    run(main())


def test_a_filter_makes_room_for_others_and_gives_up_in_the_end(tmp_path: Path):
    async def main() -> None:
        def only_two(group: SampleGroup) -> FilterVerdict:
            return FilterVerdict(keep=group.group_id in (0, 2), reason="other")

        world = World(tmp_path, max_staleness=0, group_filter=only_two, max_groups=3)
        first = world.asked()
        await world.settle()
        await world.finish(0, 1)
        assert sorted(world.stream.running) == [2]
        await world.finish(2)
        selection = world.note(await first)
        assert (selection.num_tried, selection.dropped) == (3, {"other": 1})
        await world.update(1)
        second = world.asked()
        await world.settle()
        await world.finish(3, 4)
        assert sorted(world.stream.running) == [5, 6] and not second.done()
        await world.finish(5)
        with pytest.raises(DataError, match=r"step 1: of 3 groups tried only 0 were kept, 2 .* Dropped: 3 other"):
            await second

    run(main())


def test_an_error_in_the_background_reaches_the_next_step(tmp_path: Path):
    async def main() -> None:
        world = World(tmp_path, max_staleness=1)
        first = world.asked()
        await world.settle()
        await world.finish(0, 1)
        world.note(await first)
        world.stream.queue.put_nowait(EngineError("all engines are gone"))
        await world.settle()
        with pytest.raises(EngineError, match="all engines are gone"):
            await world.pool.take(1)

    run(main())


def test_what_is_left_at_the_end_is_told(tmp_path: Path):
    async def main() -> None:
        world = World(tmp_path, max_staleness=1)
        first = world.asked()
        await world.settle()
        await world.finish(0, 1, 2)
        world.note(await first)
        assert [item.group.group_id for item in world.pool.held()] == [2, 3]
        await world.pool.stop()
        assert world.stream.is_stopped
        left = [r.fields for r in read_ledger(world.ledger_path) if r.event is LedgerEvent.BUFFERED]
        assert [(event["group"], event["reason"]) for event in left] == [(2, "run_ended"), (3, "run_ended")]

    run(main())


def test_groups_that_are_finished_already_pass_through(tmp_path: Path):
    """As after a resume: they keep the age of their tokens, and too old ones are not trained on."""

    async def main() -> None:
        world = World(tmp_path, first_step=5, max_staleness=2)
        world.pool.set_engine_version(5)
        held = world.draws.next(3, 4)
        world.draws.next_id = 3
        for item in held:
            (sample,) = item.group.samples
            sample.status, sample.tokens, sample.loss_mask = SampleStatus.COMPLETED, [1, 5], [1]
        fresh = world.draws.next
        world.draws.next = lambda count, step: held + fresh(count - 3, step)  # type: ignore[method-assign]
        start = world.stream.start

        def start_held(groups: Sequence[SampleGroup]) -> None:
            start(groups)
            for group, version in zip(groups[:3], (4, 2, 5), strict=True):
                group.samples[0].weight_versions = [version]
                world.stream.running.pop(group.group_id)
                world.stream.queue.put_nowait(group)
            world.stream.start = start  # type: ignore[method-assign]
            world.draws.next = fresh  # type: ignore[method-assign]

        world.stream.start = start_held  # type: ignore[method-assign]
        await world.take()
        assert world.taken[5] == [0, 2] and world.dropped() == {1: "too_stale"}
        issued = [r.fields for r in read_ledger(world.ledger_path) if r.event is LedgerEvent.ISSUED]
        assert [event["group"] for event in issued] == [3, 4, 5, 6], "what was issued before is not issued again"
        assert all(event["pooled"] for event in issued)

    run(main())
