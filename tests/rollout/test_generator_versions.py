"""What the generator does about updates in the middle of a response, and about engines that come back."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

import rlkit.rollout.generator as generator_module
from rlkit.engines.client import EngineClient
from rlkit.rollout.generator import MAX_ATTEMPTS, Generator
from rlkit.types.errors import EngineError, EngineUnavailable
from rlkit.types.generation import FinishReason, GenerateRequest, Generation, SamplingParams
from rlkit.types.samples import Sample, SampleStatus

SAMPLING = SamplingParams(max_new_tokens=8)


class ScriptedRouter(EngineClient):
    """Answers from a list: an error is raised, a list of (tokens so far, version) is streamed."""

    def __init__(self, *answers: Any) -> None:
        super().__init__("http://127.0.0.1:9")
        self.answers = list(answers)

    async def generate(self, request: GenerateRequest) -> Generation:
        return [answer async for answer in self.stream(request)][-1]

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Generation]:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        for position, (length, version) in enumerate(answer):
            partial = Generation(
                rid=request.rid,
                text="x" * length,
                output_ids=list(range(length)),
                logprobs=[-0.5] * length,
                finish_reason=None,
                weight_version=version,
                prompt_tokens=len(request.input_ids),
            )
            is_last = position + 1 == len(answer)
            yield replace(partial, finish_reason=FinishReason.LENGTH) if is_last else partial


def generate(router: ScriptedRouter, sample: Sample, **options: Any) -> Any:
    generator = Generator(router, [], concurrency=4, max_context_len=None, timeout_s=20.0, run_tag="test", **options)
    return asyncio.run(generator.generate(sample, SAMPLING))


def new_sample() -> Sample:
    return Sample(group_id=0, index=0, seed=7, tokens=[5, 6], prompt_length=2)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(generator_module, "FIRST_BACKOFF_S", 0.0001)
    monkeypatch.setattr(generator_module, "LONGEST_BACKOFF_S", 0.001)


def test_every_stretch_of_a_response_is_stamped_with_its_weights():
    sample = new_sample()
    router = ScriptedRouter([(1, 3), (3, 3), (5, 4), (5, 5), (8, 5)])
    generate(router, sample, follows_versions=True)
    assert (sample.weight_versions, sample.version_starts) == ([3, 4, 5], [0, 3, 5])
    assert sample.response_length == 8


def test_a_whole_answer_has_the_version_at_its_end():
    sample = new_sample()
    generate(ScriptedRouter([(3, 3), (8, 4)]), sample)
    assert (sample.weight_versions, sample.version_starts) == ([4], [0])


def test_a_continued_response_counts_from_its_own_beginning():
    sample = new_sample()
    sample.tokens += [1, 2, 3]
    sample.loss_mask, sample.rollout_logprobs = [1] * 3, [-1.0] * 3
    sample.weight_versions, sample.version_starts = [3], [0]
    generate(ScriptedRouter([(2, 3), (5, 4)]), sample, follows_versions=True)
    assert (sample.weight_versions, sample.version_starts) == ([3, 4], [0, 5])


GONE = EngineUnavailable("http://127.0.0.1:9/generate: no answer: ConnectionRefusedError")


def test_requests_wait_for_an_engine_that_is_being_restarted():
    sample = new_sample()
    outcome = generate(ScriptedRouter(*[GONE] * 20, [(8, 1)]), sample, patience_s=60.0)
    assert sample.status is SampleStatus.TRUNCATED
    assert (outcome.num_reissued, outcome.error) == (20, None)


@pytest.mark.parametrize(
    "error, patience_s",
    [(GONE, 0.0), (EngineError("http://127.0.0.1:9/generate: status 400: prompt too long"), 60.0)],
    ids=["nobody restarts it", "the engine refuses"],
)
def test_patience_ends_where_it_cannot_help(error: EngineError, patience_s: float):
    sample = new_sample()
    router = ScriptedRouter(*[error] * 20)
    outcome = generate(router, sample, patience_s=patience_s)
    assert sample.status is SampleStatus.FAILED
    assert len(router.answers) == 20 - MAX_ATTEMPTS and outcome.num_reissued == MAX_ATTEMPTS - 1


class CuttingRouter(ScriptedRouter):
    """Cuts off every answer but the last: after so many tokens, at such a version."""

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Generation]:
        is_last = len(self.answers) == 1
        self.budgets = [*getattr(self, "budgets", []), request.sampling.max_new_tokens]
        async for answer in super().stream(request):
            reason = answer.finish_reason
            yield answer if is_last or reason is None else replace(answer, finish_reason=FinishReason.ABORT)


def test_what_an_update_cuts_off_goes_on_at_the_new_weights():
    sample = new_sample()
    router = CuttingRouter([(3, 3)], EngineUnavailable("restarting"), [(0, 4)], [(2, 5)], [(3, 6)])
    outcome = generate(router, sample, outlives_updates=True)
    assert sample.status is SampleStatus.TRUNCATED and sample.response_length == 8
    assert sample.rollout_logprobs == [-0.5] * 8 and sample.loss_mask == [1] * 8
    assert (sample.weight_versions, sample.version_starts) == ([3, 4, 5, 6], [0, 3, 3, 5])
    assert router.budgets == [8, 5, 5, 5, 3], "the limit is that of the whole response"
    assert outcome.num_reissued == 1, "going on is not issuing again"


def test_without_that_it_stays_cut_off():
    sample = new_sample()
    generate(CuttingRouter([(3, 3)], [(5, 4)]), sample)
    assert sample.status is SampleStatus.ABORTED and sample.response_length == 3


def test_an_engine_that_only_cuts_off_is_given_up():
    sample = new_sample()
    router = CuttingRouter(*([[(0, 3)]] * (MAX_ATTEMPTS + 1)))
    generate(router, sample, outlives_updates=True)
    assert sample.status is SampleStatus.ABORTED and len(router.answers) == 1
