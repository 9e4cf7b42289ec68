"""A small HTTP server with the part of SGLang's API that rollout code uses: `/generate` and `/abort_request`, and a
router in front.

Tokens are a pure function of the request's seed, so tests can say what a response must be. Runs in the test's own event
loop.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson
from aiohttp import web

EOS = 1
Speech = Callable[[dict[str, Any]], tuple[list[int], str]]
"""Request body -> (all ids the model would say, their text)."""


def count_up(body: dict[str, Any]) -> tuple[list[int], str]:
    """Six ids from the seed and an end-of-sequence id."""
    ids = [10 + (body["sampling_params"]["sampling_seed"] + i) % 80 for i in range(6)] + [EOS]
    return ids, " ".join(map(str, ids[:-1]))


class FakeEngine:
    """One engine. Attributes may be changed while it runs."""

    def __init__(self, *, speech: Speech = count_up) -> None:
        self.speech = speech
        self.weight_version = 0
        self.tokens_before_abort = 2
        self.is_holding = False
        """Requests wait until they are aborted."""
        self.holds: Callable[[dict[str, Any]], bool] = lambda body: False
        """The same for some requests."""
        self.spell: Callable[[list[int]], str] | None = None
        """Text of the ids of an aborted answer; unset, it is that of the whole speech."""
        self.failures: list[int] = []
        """Statuses answered to the next requests instead of a generation."""
        self.hang_s = 0.0
        self.requests: list[dict[str, Any]] = []
        self.aborts: list[dict[str, Any]] = []
        self.num_running = 0
        self.peak_running = 0
        self.url = ""
        self.held: dict[str, asyncio.Event] = {}
        """Request id -> an event that lets it go on; an abort sets it too."""
        self._cut_off: set[str] = set()

    async def generate(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        self.requests.append(body)
        if self.failures:
            return web.Response(status=self.failures.pop(0), text="the fake engine was told to fail")
        self.num_running += 1
        self.peak_running = max(self.peak_running, self.num_running)
        try:
            return web.Response(body=orjson.dumps(await self._answer(body)), content_type="application/json")
        finally:
            self.num_running -= 1

    async def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        sampling = body["sampling_params"]
        ids, text = self.speech(body)
        reason = (
            "stop" if ids[-1] in sampling["stop_token_ids"] and len(ids) <= sampling["max_new_tokens"] else "length"
        )
        ids = ids[: sampling["max_new_tokens"]]
        stops = tuple(sampling.get("stop") or ())
        if self.spell is not None and stops and self.spell(ids).endswith(stops):
            reason, text = "stop", self.spell(ids)[:-1]  # of one character, as engines cut it from the text
        if self.hang_s:
            await asyncio.sleep(self.hang_s)
        if self.is_holding or self.holds(body):
            event = self.held[body["rid"]] = asyncio.Event()
            await event.wait()
            if body["rid"] in self._cut_off:
                ids, reason = ids[: self.tokens_before_abort], "abort"
                text = text if self.spell is None else self.spell(ids)
        dice = random.Random(sampling["sampling_seed"])
        return {
            "text": text,
            "output_ids": ids,
            "meta_info": {
                "id": body["rid"],
                "finish_reason": {"type": reason},
                "output_token_logprobs": [[-dice.random(), token, None] for token in ids],
                "weight_version": str(self.weight_version),
                "prompt_tokens": len(body["input_ids"]),
                "cached_tokens": 0,
                "e2e_latency": 0.0,
            },
        }

    def cut_off_all(self) -> None:
        """What a pause in abort mode does: nobody of the rollout asked for it."""
        for rid, event in self.held.items():
            self._cut_off.add(rid)
            event.set()

    async def abort(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        self.aborts.append(body)
        for rid, event in self.held.items():
            if body["abort_all"] or rid.startswith(body["rid"]):
                self._cut_off.add(rid)
                event.set()
        return web.Response()

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/abort_request", self.abort)
        return app


@asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[str]:
    """Serve on a free port; yields the url."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def running_engine(engine: FakeEngine) -> AsyncIterator[FakeEngine]:
    async with serving(engine.app()) as url:
        engine.url = url
        yield engine


@asynccontextmanager
async def running_router(urls: list[str]) -> AsyncIterator[str]:
    """Round robin over `urls`; a worker that refuses the connection becomes a 503, as in sglang-router without
    retries.
    """
    turn = 0

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:

        async def forward(request: web.Request) -> web.Response:
            nonlocal turn
            url = urls[turn % len(urls)]
            turn += 1
            try:
                async with session.post(f"{url}/generate", data=await request.read()) as answer:
                    return web.Response(
                        status=answer.status, body=await answer.read(), content_type=answer.content_type
                    )
            except aiohttp.ClientError as error:
                return web.Response(status=503, text=f"no worker: {error}")

        app = web.Application()
        app.router.add_post("/generate", forward)
        async with serving(app) as url:
            yield url
