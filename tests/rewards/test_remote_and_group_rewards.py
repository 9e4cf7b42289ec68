"""Rewards from a server, and from functions that see a whole group."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

import rlkit.rewards.remote as remote_module
from rlkit.config.schema import RewardConfig
from rlkit.rewards.pool import GradeResult, GraderPool
from rlkit.types.errors import RewardError
from rlkit.types.samples import Prompt, Sample

PROMPT = Prompt(position=0, epoch=0, token_ids=[1], text="2+2=")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remote_module, "FIRST_BACKOFF_S", 0.001)


def sample_of(response: str, label: object = None, **metadata: Any) -> Sample:
    return Sample(
        group_id=4, index=2, seed=0, tokens=[1, 2], prompt_length=1, response=response, label=label, metadata=metadata
    )


class RewardServer:
    """Answers with the length of the response; `statuses` come first, and `hang_s` is waited."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.hang_s = 0.0
        self.bodies: list[dict[str, Any]] = []
        self.answer: Any = None

    async def handle(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        if self.statuses:
            return web.Response(status=self.statuses.pop(0), text="not now")
        await asyncio.sleep(self.hang_s)
        return web.json_response(len(self.bodies[-1]["response"]) if self.answer is None else self.answer)


@asynccontextmanager
async def serving(server: RewardServer) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/rm", server.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/rm"
    finally:
        await runner.cleanup()


def ask(server: RewardServer, *samples: Sample, **options: Any) -> tuple[list[GradeResult], dict[str, int]]:
    async def main() -> tuple[list[GradeResult], dict[str, int]]:
        async with serving(server) as url:
            pool = GraderPool(RewardConfig(rm_url=url, **{"rm_type": "remote_rm", "rm_max_retries": 2, **options}))
            try:
                results = await asyncio.gather(*(pool.grade(sample, prompt=PROMPT) for sample in samples))
                return list(results), pool.counters()
            finally:
                await pool.aclose()

    return asyncio.run(asyncio.wait_for(main(), 30))


def test_the_server_sees_prompt_response_label_and_metadata():
    server = RewardServer()
    (result,), counts = ask(server, sample_of("four", ["4"], level=3))
    assert result.reward == 4.0 and counts["graded"] == 1
    assert server.bodies == [{"prompt": "2+2=", "response": "four", "label": ["4"], "metadata": {"level": 3}}]


def test_a_busy_server_is_asked_again():
    server = RewardServer()
    server.statuses = [503, 429]
    (result,), _ = ask(server, sample_of("four"))
    assert result.reward == 4.0 and len(server.bodies) == 3


@pytest.mark.parametrize(("statuses", "num_asked"), [([500] * 3, 3), ([422], 1)], ids=["worth_a_retry", "refused"])
def test_a_server_without_an_answer_leaves_the_sample_unscored(statuses: list[int], num_asked: int):
    server = RewardServer()
    server.statuses = list(statuses)
    (result,), counts = ask(server, sample_of("four"))
    assert result.reward is None and result.error is not None and "not now" in result.error
    assert counts["error"] == 1 and len(server.bodies) == num_asked


def test_a_slow_server_is_a_timeout():
    server = RewardServer()
    server.hang_s = 5.0
    (result,), counts = ask(server, sample_of("four"), rm_timeout_s=0.1, rm_max_retries=1)
    assert result.reward is None and counts["timeout"] == 1 and len(server.bodies) == 2


def test_objects_need_a_reward_key_and_rows_may_choose_the_server():
    server = RewardServer()
    server.answer = {"score": 0.5, "why": "x"}
    (result,), _ = ask(server, sample_of("a"), reward_key="score")
    assert result.reward == 0.5 and result.detail == {"score": 0.5, "why": "x"}
    with pytest.raises(RewardError, match="--reward-key"):
        ask(server, sample_of("a"))
    results, _ = ask(
        server, sample_of("4", "4"), sample_of("4", "5", rm_type="remote_rm"), rm_type="exact", reward_key="score"
    )
    assert [result.reward for result in results] == [1.0, 0.5]


def test_a_server_that_is_not_set_is_said():
    async def main() -> None:
        pool = GraderPool(RewardConfig(rm_type="exact"))
        await pool.grade(sample_of("4", "4", rm_type="remote_rm"))

    with pytest.raises(RewardError, match="--rm-url"):
        asyncio.run(main())


# ---- whole groups ----------------------------------------------------------------------------------------------------

GROUP_FUNCTION = """
def rank(responses, label, metadata):
    "Share of the others that are shorter."
    return [sum(len(o) < len(r) for o in responses) / max(len(responses) - 1, 1) for r in responses]
def detailed(responses, label, metadata):
    return [{"score": 1.0} if r else None for r in responses]
def wrong(responses, label, metadata):
    return [0.0]
"""


def grade_group(tmp_path: Path, name: str, *responses: str, **options: Any) -> list[GradeResult]:
    path = tmp_path / "group_rewards.py"
    path.write_text(GROUP_FUNCTION)

    async def main() -> list[GradeResult]:
        cfg = RewardConfig(custom_rm_path=f"{path}:{name}", group_rm=True, rm_num_workers=1, **options)
        pool = GraderPool(cfg)
        try:
            return await pool.grade_group([sample_of(response) for response in responses], PROMPT)
        finally:
            await pool.aclose()

    return asyncio.run(main())


def test_a_function_sees_the_whole_group(tmp_path: Path):
    results = grade_group(tmp_path, "rank", "aaa", "a", "aa")
    assert [result.reward for result in results] == [1.0, 0.0, 0.5]


def test_members_of_a_group_may_be_unscored_or_have_details(tmp_path: Path):
    first, second = grade_group(tmp_path, "detailed", "a", "", reward_key="score")
    assert first.reward == 1.0 and first.detail == {"score": 1.0}
    assert second.reward is None and second.error is not None and second.error.startswith("none")


def test_a_list_of_another_length_is_an_error(tmp_path: Path):
    with pytest.raises(RewardError, match=r"got 2 responses and must return a list of as many"):
        grade_group(tmp_path, "wrong", "a", "b")
