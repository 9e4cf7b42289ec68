"""Generating and grading groups, for training and for evaluation.

Every sample is a task of its own: it waits for a place in the generator, and is graded the moment its response is
there, so that grading overlaps generation. `Collector.collect` finishes a list of groups; a `Collection` hands out
groups as they finish and can be stopped. Called by `select.py`, `manager.py` and `evaluate.py`.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rlkit.observability.ledger import Ledger, LedgerEvent
from rlkit.rewards.pool import GradeResult, GraderPool
from rlkit.rollout.generator import Generator, Outcome
from rlkit.rollout.seeds import TRAIN_STREAM, sample_seed
from rlkit.types.generation import SamplingParams
from rlkit.types.samples import Prompt, Sample, SampleGroup, SampleStatus

ABORT_GRACE_S = 5.0
"""For the tokens of requests that are cut off to come back; engines answer an abort within a second."""

ProgressCallback = Callable[[int, int], None]
"""(samples done, samples wanted)."""


@dataclass(kw_only=True, slots=True)
class Collected:
    """How a collection went, beside what its groups now hold."""

    generate_s: float = 0.0
    """Until the last response."""
    grade_s: float = 0.0
    """From the last response to the last grade."""
    num_reissued: int = 0
    engine_error: str | None = None
    """An error that left a sample FAILED; None when none did."""
    grade_error: str | None = None
    """What a grader said that did not score its sample; None when all did."""
    grader_counts: dict[str, int] = field(default_factory=dict)
    """`GraderPool.counters` of this collection alone."""


def open_group(
    prompt: Prompt, group_id: int, num_samples: int, *, run_seed: int, stream: str = TRAIN_STREAM
) -> SampleGroup:
    """A group whose samples hold the prompt's tokens, their seeds and nothing else yet."""
    samples = [
        Sample(
            group_id=group_id,
            index=index,
            seed=sample_seed(run_seed, group_id, index, stream=stream),
            tokens=list(prompt.token_ids),
            prompt_length=len(prompt.token_ids),
            label=prompt.label,
            metadata=prompt.metadata,
        )
        for index in range(num_samples)
    ]
    return SampleGroup(group_id=group_id, prompt=prompt, samples=samples)


class GroupLedger:
    """Writes the events of groups while they are collected."""

    def __init__(self, ledger: Ledger, step: int) -> None:
        self._ledger = ledger
        self.step = step
        """Of the events; with `--async-mode full` the one whose batch was taken last."""

    def issued(self, group: SampleGroup, *, is_pooled: bool = False) -> None:
        """`is_pooled`: it may be trained on in any later step (`--async-mode full`)."""
        pooled = {"pooled": True} if is_pooled else {}
        self._ledger.write(
            LedgerEvent.ISSUED,
            step=self.step,
            group=group.group_id,
            position=group.prompt.position,
            epoch=group.prompt.epoch,
            num_samples=len(group.samples),
            seeds=[sample.seed for sample in group.samples],
            **pooled,
        )

    def generated(self, group: SampleGroup, num_reissued: int) -> None:
        again = {"reissued": num_reissued} if num_reissued else {}
        self._ledger.write(
            LedgerEvent.GENERATED,
            step=self.step,
            group=group.group_id,
            status=[sample.status for sample in group.samples],
            lengths=[sample.response_length for sample in group.samples],
            versions=[sample.weight_versions for sample in group.samples],
            **again,
        )

    def dropped(self, group: SampleGroup, reason: str) -> None:
        self._ledger.write(LedgerEvent.DROPPED, step=self.step, group=group.group_id, reason=reason)

    def buffered(self, group: SampleGroup, reason: str) -> None:
        self._ledger.write(LedgerEvent.BUFFERED, step=self.step, group=group.group_id, reason=reason)

    def graded(self, group: SampleGroup) -> None:
        rewards = [sample.reward for sample in group.samples]
        self._ledger.write(LedgerEvent.GRADED, step=self.step, group=group.group_id, rewards=rewards)


class Responder(Protocol):
    """Who turns a prompt into responses: `Generator` itself, a function of the user (`turns.py`), an agent
    (`agents.py`)."""

    async def respond(
        self, sample: Sample, sampling: SamplingParams, *, evaluation: bool, prompt: Prompt
    ) -> tuple[list[Sample], Outcome]:
        """Generate, or continue, the response in place. The list holds the sample, or what it fans out into."""
        ...


class SingleTurn:
    """One request a sample."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    async def respond(
        self, sample: Sample, sampling: SamplingParams, *, evaluation: bool, prompt: Prompt
    ) -> tuple[list[Sample], Outcome]:
        return [sample], await self._generator.generate(sample, sampling)


class Collector:
    """Runs groups through one generator and one pool of graders."""

    def __init__(
        self, generator: Generator, graders: GraderPool, *, responder: Responder | None = None, group_rm: bool = False
    ) -> None:
        """`group_rm` grades a training group as a whole, when its last response is there (`--group-rm`)."""
        self._generator = generator
        self._graders = graders
        self._responder = responder or SingleTurn(generator)
        self._group_rm = group_rm
        self.last: Collection | None = None
        """The collection begun last, for whoever asks what it waits for."""

    def with_graders(self, graders: GraderPool) -> "Collector":
        """The same with other graders, as an evaluation set may have."""
        return Collector(self._generator, graders, responder=self._responder, group_rm=self._group_rm)

    def begin(
        self,
        sampling: SamplingParams,
        *,
        evaluation: bool,
        on_progress: ProgressCallback | None = None,
        ledger: GroupLedger | None = None,
    ) -> "Collection":
        """A collection without groups."""
        self.last = Collection(
            self._generator,
            self._responder,
            self._graders,
            sampling,
            evaluation=evaluation,
            group_rm=self._group_rm and not evaluation,
            on_progress=on_progress,
            ledger=ledger,
        )
        return self.last

    async def collect(
        self,
        groups: Sequence[SampleGroup],
        sampling: SamplingParams,
        *,
        evaluation: bool,
        on_progress: ProgressCallback | None = None,
        ledger: GroupLedger | None = None,
    ) -> Collected:
        """Fill in every sample of the groups.

        What concerns one sample ends up on the sample; any other error, or being cancelled, stops all generation and
        is raised.
        """
        collection = self.begin(sampling, evaluation=evaluation, on_progress=on_progress, ledger=ledger)
        collection.start(groups)
        try:
            for _ in groups:
                await collection.next_finished()
        except BaseException:
            await collection.stop(grace_s=0.0)
            raise
        return collection.finish()


@dataclass(kw_only=True, slots=True)
class _Member:
    """One group of a collection and how far it is."""

    group: SampleGroup
    num_to_generate: int
    num_to_grade: int
    responses: list[list[Sample]]
    """[index] -> the sample, or what it fanned out into."""
    num_reissued: int = 0


class Collection:
    """Groups in the making. They finish in any order; `next_finished` waits for one, `stop` cuts off the rest."""

    def __init__(
        self,
        generator: Generator,
        responder: Responder,
        graders: GraderPool,
        sampling: SamplingParams,
        *,
        evaluation: bool,
        group_rm: bool,
        on_progress: ProgressCallback | None,
        ledger: GroupLedger | None,
    ) -> None:
        self._generator = generator
        self._responder = responder
        self._graders = graders
        self._sampling = sampling
        self._evaluation = evaluation
        self._group_rm = group_rm
        self._on_progress = on_progress
        self._ledger = ledger
        self._finished: asyncio.Queue[SampleGroup | BaseException] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._grading: set[asyncio.Task[None]] = set()
        self._is_stopping = False
        self._waits: dict[tuple[int, int], tuple[str, float]] = {}
        """(group, place) -> what that sample waits for, since when."""
        self._num_samples = 0
        self._num_done = 0
        self._began = self._last_response = time.perf_counter()
        self._counts_before = graders.counters()
        self._result = Collected()

    def start(self, groups: Sequence[SampleGroup]) -> None:
        """Generate and grade these too. What a sample holds already is continued, or kept where it is finished."""
        for group in groups:
            self._num_samples += len(group.samples)
        if self._on_progress is not None:
            self._on_progress(self._num_done, self._num_samples)
        for group in groups:
            size = len(group.samples)
            member = _Member(
                group=group, num_to_generate=size, num_to_grade=size, responses=[[s] for s in group.samples]
            )
            for place, sample in enumerate(group.samples):
                task = asyncio.create_task(self._sample(member, place, sample))
                self._tasks.add(task)
                task.add_done_callback(self._task_done)

    async def next_finished(self) -> SampleGroup:
        """The next group of which every sample is generated and graded. Raises what is wrong for the whole run."""
        finished = await self._finished.get()
        if isinstance(finished, BaseException):
            raise finished
        return finished

    async def stop(self, *, grace_s: float = ABORT_GRACE_S) -> None:
        """Cut off everything that still runs. Samples keep their tokens so far; nothing runs when this returns."""
        self._is_stopping = True
        for task in self._grading:
            task.cancel()  # a finished sample without a reward is graded when its group is taken up again
        if self._tasks:
            await self._generator.abort(set(self._tasks), grace_s=grace_s)

    def waits(self) -> list[str]:
        """What samples wait for: one sentence for responses and one for rewards, each with the longest wait."""
        now = time.perf_counter()
        told: list[str] = []
        for what in dict.fromkeys(what for what, _ in self._waits.values()):
            waiting = [(since, key) for key, (of, since) in self._waits.items() if of == what]
            since, (group, place) = min(waiting)
            told.append(
                f"{len(waiting)} samples wait for {what}, the longest since {now - since:.0f} s "
                f"(sample {place} of group {group})"
            )
        return told

    def finish(self) -> Collected:
        """Times and counts of the whole collection."""
        self._result.generate_s = self._last_response - self._began
        self._result.grade_s = time.perf_counter() - self._last_response
        counts = self._graders.counters()
        self._result.grader_counts = {name: count - self._counts_before[name] for name, count in counts.items()}
        return self._result

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._grading.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._finished.put_nowait(error)

    async def _sample(self, member: _Member, place: int, sample: Sample) -> None:
        key = (member.group.group_id, place)
        try:
            self._waits[key] = "their responses from the engines", time.perf_counter()
            await self._run_sample(member, place, sample)
        finally:
            del self._waits[key]

    async def _run_sample(self, member: _Member, place: int, sample: Sample) -> None:
        if not sample.status.is_trainable:  # one that an earlier step finished is kept as it is
            await self._respond(member, place, sample)
        if self._is_stopping:
            return
        task = asyncio.current_task()
        assert task is not None
        self._grading.add(task)
        self._waits[member.group.group_id, place] = "their rewards", time.perf_counter()
        member.num_to_generate -= 1
        if member.num_to_generate == 0:
            if self._ledger is not None:
                self._ledger.generated(member.group, member.num_reissued)
            if self._group_rm:
                await self._grade_group(member.group)
        if not self._group_rm:
            await asyncio.gather(*(self._grade(response, member.group) for response in member.responses[place]))
        self._num_done += 1
        if self._on_progress is not None:
            self._on_progress(self._num_done, self._num_samples)
        member.num_to_grade -= 1
        if member.num_to_grade == 0:
            if self._ledger is not None:
                self._ledger.graded(member.group)
            self._finished.put_nowait(member.group)

    async def _respond(self, member: _Member, place: int, sample: Sample) -> None:
        try:
            responses, outcome = await self._responder.respond(
                sample, self._sampling, evaluation=self._evaluation, prompt=member.group.prompt
            )
        except asyncio.CancelledError:
            sample.status = SampleStatus.ABORTED
            raise
        self._last_response = time.perf_counter()
        self._result.engine_error = outcome.error or self._result.engine_error
        self._result.num_reissued += outcome.num_reissued
        member.num_reissued += outcome.num_reissued
        member.responses[place] = responses
        member.group.samples = [response for made in member.responses for response in made]

    async def _grade(self, sample: Sample, group: SampleGroup) -> None:
        if not _can_be_graded(sample) or sample.reward is not None:
            return
        result = await self._graders.grade(sample, prompt=group.prompt, evaluation=self._evaluation)
        self._note(sample, result)

    async def _grade_group(self, group: SampleGroup) -> None:
        samples = [sample for sample in group.samples if _can_be_graded(sample)]
        if samples:
            for sample, result in zip(samples, await self._graders.grade_group(samples, group.prompt), strict=True):
                self._note(sample, result)

    def _note(self, sample: Sample, result: GradeResult) -> None:
        sample.reward = result.reward
        sample.reward_detail = result.detail
        if result.reward is None:
            self._result.grade_error = result.error or "the grader returned None"


def _can_be_graded(sample: Sample) -> bool:
    return sample.status.is_trainable and sample.response_length > 0
