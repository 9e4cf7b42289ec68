"""What the HTTP routes of the embedded engine share: who waits for which request, and how an answer looks.

Runs on the event loop; `Service.deliver` is the engine thread's way in.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import orjson
from fastapi import Request, Response
from starlette.responses import StreamingResponse

from rlkit.engines.embedded.engine import Engine
from rlkit.engines.embedded.group import UpdateGroups
from rlkit.engines.embedded.protocol import Refusal, RequestReader, answer, is_stream, refusal_event
from rlkit.engines.embedded.request import EngineRequest, Output
from rlkit.engines.wire import parse_weight_version
from rlkit.types.errors import EngineError


class Waiter:
    """Where the outputs of one request arrive on the event loop: the newest replaces an older one not yet read."""

    def __init__(self) -> None:
        self._newest: Output | None = None
        self._arrived = asyncio.Event()

    def put(self, output: Output) -> None:
        self._newest = output
        self._arrived.set()

    async def next(self) -> Output:
        await self._arrived.wait()
        self._arrived.clear()
        assert self._newest is not None
        return self._newest


class Service:
    """What the routes share. `deliver` is the engine thread's way in; everything else runs on the event loop."""

    def __init__(self, reader: RequestReader, *, server_info: dict[str, Any], model_info: dict[str, Any]) -> None:
        self.reader = reader
        self.server_info = server_info
        self.model_info = model_info
        self.groups = UpdateGroups()
        self._engine: Engine | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiters: dict[str, Waiter] = {}

    @property
    def engine(self) -> Engine:
        assert self._engine is not None
        return self._engine

    def bind(self, engine: Engine) -> None:
        """Called in the event loop before the first request."""
        self._engine, self._loop = engine, asyncio.get_running_loop()

    def deliver(self, outputs: list[Output]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._put, outputs)

    def _put(self, outputs: list[Output]) -> None:
        for output in outputs:
            if (waiter := self._waiters.get(output.request.rid)) is not None:
                waiter.put(output)

    async def outputs(self, request: EngineRequest) -> AsyncIterator[Output]:
        """Submit, then yield until the final output. Leaving early aborts the request."""
        if request.rid in self._waiters:
            raise Refusal(f"Duplicate request ID detected: {request.rid}")
        waiter = self._waiters[request.rid] = Waiter()
        try:
            self.engine.submit(request)
            while True:
                output = await waiter.next()
                yield output
                if output.is_final:
                    return
        finally:
            del self._waiters[request.rid]
            if request.finish is None:
                self.engine.call(lambda: self.engine.abort(lambda other: other is request))

    async def call(self, run: Callable[[], Any], *, needs_idle: bool = False) -> Any:
        return await asyncio.wrap_future(self.engine.call(run, needs_idle=needs_idle))

    async def update(
        self, load: Callable[[], None], *, version: str | None, flush_cache: bool, abort_all: bool
    ) -> Response:
        """Run a weight update on the engine thread and answer as SGLang does."""
        try:
            if version is not None:
                parse_weight_version(version)
            if abort_all:
                await self.call(lambda: self.engine.abort(lambda _: True))
            await self.call(
                lambda: self.engine.update_weights(load, version=version, flush_cache=flush_cache),
                needs_idle=True,
            )
        except EngineError as error:
            return json_response({"success": False, "message": str(error)}, 400)
        suffix = "" if version is None else f" Weight version updated to {version}."
        return json_response({"success": True, "message": f"Success{suffix}", "num_paused_requests": 0})

    async def generate(self, request: Request) -> Response:
        try:
            body = orjson.loads(await request.body())
        except orjson.JSONDecodeError as error:
            return bad_request_response(f"the body is not JSON: {error}")
        if is_stream(body):
            return StreamingResponse(self._events(body), media_type="text/event-stream")
        try:
            final = await self._final(self.reader.read(body), request)
        except Refusal as error:
            return error_response(str(error), 400)
        return error_response("the client has left", 499) if final is None else _final_response(final)

    async def _events(self, body: object) -> AsyncIterator[bytes]:
        try:
            async for output in self.outputs(self.reader.read(body)):
                yield b"data: " + orjson.dumps(answer(output)) + b"\n\n"
        except Refusal as error:
            yield b"data: " + orjson.dumps(refusal_event(str(error))) + b"\n\n"
        yield b"data: [DONE]\n\n"

    async def abort(self, rid: str) -> None:
        """As in SGLang: an unknown id is ignored, a known one stops every request whose id begins with it."""
        if rid in self._waiters:
            await self.call(lambda: self.engine.abort(lambda request: request.matches(rid)))

    async def _final(self, engine_request: EngineRequest, request: Request) -> Output | None:
        """The last output; None when the client closed the connection before."""

        async def last() -> Output | None:
            newest = None
            async for output in self.outputs(engine_request):
                newest = output
            return newest

        answered, left = asyncio.ensure_future(last()), asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait((answered, left), return_when=asyncio.FIRST_COMPLETED)
            return answered.result() if answered.done() else None
        finally:
            left.cancel()
            if not answered.done():
                answered.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _final_response(output: Output) -> Response:
    finish = output.finish
    assert finish is not None
    if (status := finish.get("status_code")) is not None:
        return error_response(finish["message"], status)
    return json_response(answer(output))


def json_response(content: object, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status_code=status, media_type="application/json")


def error_response(message: str, status: int) -> Response:
    """SGLang's shape for a request that was understood and refused."""
    return json_response({"error": {"message": message}}, status)


def bad_request_response(message: str) -> Response:
    """SGLang's shape for a body that was not understood."""
    return json_response(
        {"object": "error", "message": message, "type": "Bad Request", "param": None, "code": 400}, 400
    )
