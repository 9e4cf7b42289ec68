"""Generating and grading a list of groups at once, for training and for evaluation.

Every sample is a task of its own: it waits for a place in the generator, and is graded the moment its response is
there, so that grading overlaps generation. Called by `manager.py` and `evaluate.py`.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rlkit.observability.ledger import Ledger, LedgerEvent
from rlkit.rewards.pool import GraderPool
from rlkit.rollout.generator import Generator
from rlkit.rollout.seeds import TRAIN_STREAM, sample_seed
from rlkit.types.generation import SamplingParams
from rlkit.types.samples import Prompt, Sample, SampleGroup

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
    """Writes the events of groups of one step while they are collected."""

    def __init__(self, ledger: Ledger, step: int) -> None:
        self._ledger = ledger
        self._step = step

    def issued(self, group: SampleGroup) -> None:
        self._ledger.write(
            LedgerEvent.ISSUED,
            step=self._step,
            group=group.group_id,
            position=group.prompt.position,
            epoch=group.prompt.epoch,
            num_samples=len(group.samples),
            seeds=[sample.seed for sample in group.samples],
        )

    def generated(self, group: SampleGroup, num_reissued: int) -> None:
        again = {"reissued": num_reissued} if num_reissued else {}
        self._ledger.write(
            LedgerEvent.GENERATED,
            step=self._step,
            group=group.group_id,
            status=[sample.status for sample in group.samples],
            lengths=[sample.response_length for sample in group.samples],
            versions=[sample.weight_versions for sample in group.samples],
            **again,
        )

    def graded(self, group: SampleGroup) -> None:
        rewards = [sample.reward for sample in group.samples]
        self._ledger.write(LedgerEvent.GRADED, step=self._step, group=group.group_id, rewards=rewards)


class Collector:
    """Runs groups through one generator and one pool of graders."""

    def __init__(self, generator: Generator, graders: GraderPool) -> None:
        self._generator = generator
        self._graders = graders

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
        counts_before = self._graders.counters()
        run = _Collection(self._generator, self._graders, groups, sampling, evaluation, on_progress, ledger)
        tasks = [asyncio.create_task(run.sample(member, s)) for member in run.members for s in member.group.samples]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            await self._generator.abort([task for task in tasks if not task.done()], grace_s=0.0)
            raise
        collected = run.finish()
        counts = self._graders.counters()
        collected.grader_counts = {name: count - counts_before[name] for name, count in counts.items()}
        return collected


@dataclass(kw_only=True, slots=True)
class _Member:
    """One group of a collection and how far it is."""

    group: SampleGroup
    num_to_generate: int
    num_to_grade: int
    num_reissued: int = 0


class _Collection:
    """The state of one `collect`."""

    def __init__(
        self,
        generator: Generator,
        graders: GraderPool,
        groups: Sequence[SampleGroup],
        sampling: SamplingParams,
        evaluation: bool,
        on_progress: ProgressCallback | None,
        ledger: GroupLedger | None,
    ) -> None:
        self.members = [
            _Member(group=group, num_to_generate=len(group.samples), num_to_grade=len(group.samples))
            for group in groups
        ]
        self._generator = generator
        self._graders = graders
        self._sampling = sampling
        self._evaluation = evaluation
        self._on_progress = on_progress
        self._ledger = ledger
        self._num_samples = sum(len(group.samples) for group in groups)
        self._num_done = 0
        self._began = self._last_response = time.perf_counter()
        self._result = Collected()
        if on_progress is not None:
            on_progress(0, self._num_samples)

    async def sample(self, member: _Member, sample: Sample) -> None:
        outcome = await self._generator.generate(sample, self._sampling)
        self._last_response = time.perf_counter()
        self._result.engine_error = outcome.error or self._result.engine_error
        member.num_reissued += outcome.num_reissued
        member.num_to_generate -= 1
        if self._ledger is not None and member.num_to_generate == 0:
            self._ledger.generated(member.group, member.num_reissued)

        if sample.status.is_trainable and sample.response_length > 0:
            await self._grade(sample)
        member.num_to_grade -= 1
        if self._ledger is not None and member.num_to_grade == 0:
            self._ledger.graded(member.group)
        self._num_done += 1
        if self._on_progress is not None:
            self._on_progress(self._num_done, self._num_samples)

    async def _grade(self, sample: Sample) -> None:
        result = await self._graders.grade(sample, evaluation=self._evaluation)
        sample.reward = result.reward
        sample.reward_detail = result.detail
        if result.reward is None:
            self._result.grade_error = result.error or "the grader returned None"

    def finish(self) -> Collected:
        self._result.generate_s = self._last_response - self._began
        self._result.grade_s = time.perf_counter() - self._last_response
        self._result.num_reissued = sum(member.num_reissued for member in self.members)
        return self._result
