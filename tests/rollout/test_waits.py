"""What samples wait for, as the watchdog is told."""

import asyncio

from rlkit.rewards.pool import GradeResult
from rlkit.rollout.collect import Collection, open_group
from rlkit.rollout.generator import Outcome
from rlkit.types.generation import SamplingParams
from rlkit.types.samples import Prompt, SampleStatus


class Answers:
    """Responds at once to sample 0, to the others when told; grades when told."""

    def __init__(self) -> None:
        self.respond_now = asyncio.Event()
        self.grade_now = asyncio.Event()

    def counters(self) -> dict[str, int]:
        return {}

    async def respond(self, sample, sampling, *, evaluation, prompt):
        if sample.index > 0:
            await self.respond_now.wait()
        sample.tokens.append(5)
        sample.status = SampleStatus.COMPLETED
        return [sample], Outcome()

    async def grade(self, sample, **options) -> GradeResult:
        await self.grade_now.wait()
        return GradeResult(reward=1.0, detail=None, seconds=0.0)


def test_responses_and_rewards_are_told_apart_with_the_longest_wait():
    async def run() -> list[list[str]]:
        answers = Answers()
        collection = Collection(
            None, answers, answers, SamplingParams(max_new_tokens=4, temperature=1.0),
            evaluation=False, group_rm=False, on_progress=None, ledger=None,
        )  # fmt: skip  # pyright: ignore[reportArgumentType]
        told = [collection.waits()]
        prompt = Prompt(position=0, epoch=0, token_ids=[1, 2], text="")
        collection.start([open_group(prompt, 7, 3, run_seed=0)])
        await asyncio.sleep(0.05)
        told.append(collection.waits())
        answers.respond_now.set()
        answers.grade_now.set()
        await collection.next_finished()
        await asyncio.sleep(0)
        told.append(collection.waits())
        return told

    before, meanwhile, after = asyncio.run(run())
    assert before == after == []
    assert sorted(line.split(", the longest")[0] for line in meanwhile) == [
        "1 samples wait for their rewards",
        "2 samples wait for their responses from the engines",
    ]
    assert any("(sample 1 of group 7)" in line for line in meanwhile)
