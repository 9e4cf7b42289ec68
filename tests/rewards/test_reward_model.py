"""Scores of a reward model: batches, retries, bounds, and answers that are none."""

import asyncio
from typing import Any

import pytest
from aiohttp import web

import rlkit.rewards.remote as remote_module
from rlkit.config.schema import RewardConfig
from rlkit.rewards.pool import GradeResult, GraderPool
from rlkit.types.errors import DataError, RewardError
from rlkit.types.samples import Prompt, Sample

PROMPT = Prompt(position=0, epoch=0, token_ids=[1], text="2+2=")
TOO_LONG = 9


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remote_module, "FIRST_BACKOFF_S", 0.001)


def render(sample: Sample, prompt: Prompt) -> list[int]:
    if sample.response == "unreadable":
        raise DataError("the template refuses it")
    return [0] * len(sample.response)


def sample_of(length: int) -> Sample:
    return Sample(group_id=0, index=0, seed=0, tokens=[1, 2], prompt_length=1, response="x" * length)


class ScoringServer:
    """The score of a row is its length; rows of TOO_LONG are refused."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.statuses: list[int] = []
        self.num_running = self.peak_running = 0
        self.answer: Any = None
        self.hang_s = 0.01

    async def classify(self, request: web.Request) -> web.Response:
        rows = (await request.json())["input_ids"]
        self.batches.append(len(rows))
        self.num_running += 1
        self.peak_running = max(self.peak_running, self.num_running)
        await asyncio.sleep(self.hang_s)
        self.num_running -= 1
        if self.statuses:
            return web.Response(status=self.statuses.pop(0), text="busy")
        if any(len(row) >= TOO_LONG for row in rows):
            return web.Response(status=400, text="a row is too long")
        scores = [{"embedding": [float(len(row))], "meta_info": {}} for row in rows]
        return web.json_response(scores if self.answer is None else self.answer)


def ask(server: ScoringServer, *samples: Sample, **options: Any) -> tuple[list[GradeResult], dict[str, int]]:
    async def main() -> tuple[list[GradeResult], dict[str, int]]:
        app = web.Application()
        app.router.add_post("/classify", server.classify)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        settings = {"rm_type": "reward_model", "rm_model": "m", "rm_max_retries": 2, "rm_batch_size": 4, **options}
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
        pool = GraderPool(RewardConfig(rm_url=url, **settings), render=render)
        try:
            return list(await asyncio.gather(*(pool.grade(s, prompt=PROMPT) for s in samples))), pool.counters()
        finally:
            await pool.aclose()
            await runner.cleanup()

    return asyncio.run(asyncio.wait_for(main(), 30))


def test_responses_that_wait_travel_together_and_no_more_than_allowed():
    server = ScoringServer()
    results, counts = ask(server, *(sample_of(number % 7 + 1) for number in range(30)))
    assert [result.reward for result in results] == [number % 7 + 1 for number in range(30)]
    assert server.batches == [4] * 7 + [2] and server.peak_running <= 4 and counts["graded"] == 30


def test_a_busy_server_is_asked_again():
    server = ScoringServer()
    server.statuses = [503, 500]
    (result,), _ = ask(server, sample_of(3))
    assert result.reward == 3.0 and server.batches == [1, 1, 1]


def test_a_response_that_is_refused_takes_no_other_along():
    results, counts = ask(ScoringServer(), sample_of(2), sample_of(TOO_LONG), sample_of(5))
    assert [result.reward for result in results] == [2.0, None, 5.0]
    assert counts["error"] == 1 and "too long" in str(results[1].error)


def test_a_server_that_is_gone_leaves_samples_unscored_after_the_retries_of_one_request():
    server = ScoringServer()
    server.statuses = [503] * 99
    results, counts = ask(server, sample_of(2), sample_of(3))
    assert [result.reward for result in results] == [None, None] and counts["error"] == 2
    assert server.batches == [2, 2, 2]


def test_a_slow_server_is_a_timeout():
    server = ScoringServer()
    server.hang_s = 5.0
    results, counts = ask(server, sample_of(2), sample_of(3), rm_timeout_s=0.1, rm_max_retries=0)
    assert [result.reward for result in results] == [None, None] and counts["timeout"] == 2


def test_what_cannot_be_rendered_is_unscored():
    sample = sample_of(1)
    sample.response = "unreadable"
    (result,), counts = ask(ScoringServer(), sample)
    assert result.reward is None and counts["error"] == 1 and "template refuses" in str(result.error)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ([{"text": "hello"}], "--rm-url must be a server of"),
        ([], "expected 1 objects"),
        ([{"embedding": [0.5, 0.5]}], "num_labels 1"),
    ],
)
def test_a_server_of_something_else_ends_the_run(answer: Any, told: str):
    server = ScoringServer()
    server.answer = answer
    with pytest.raises(RewardError, match=told):
        ask(server, sample_of(1))


def test_a_score_that_is_no_number_is_unscored():
    server = ScoringServer()
    server.answer = [{"embedding": [float("nan")]}]
    (result,), counts = ask(server, sample_of(1))
    assert result.reward is None and counts["error"] + counts["not_finite"] == 1


def test_without_a_model_there_is_no_score():
    with pytest.raises(RewardError, match="--rm-url and --rm-model"):
        asyncio.run(GraderPool(RewardConfig(rm_type="reward_model")).grade(sample_of(1), prompt=PROMPT))
