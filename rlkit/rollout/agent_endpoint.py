"""The policy as a model behind OpenAI's chat API, for the agents of one rollout manager: an address and a key for each
episode. Called by `agents.py`.

    POST {base_url}/chat/completions     messages, tools, max_tokens or max_completion_tokens, stop, stream
    GET  {base_url}/models

The run decides how tokens are sampled (temperature, top-p), so that log-probs are those of the policy that is trained;
what a request says about it is not used.
"""

import asyncio
import secrets
import time
from collections.abc import Mapping
from typing import Any

import orjson
from aiohttp import web

from rlkit.data.chat_messages import on_the_wire, read_messages
from rlkit.rollout.episode import Episode, EpisodeOverError, NoRoomError, Reply, TooManyTurnsError
from rlkit.types.errors import DataError

MODEL_NAME = "policy"
MAX_BODY_BYTES = 64 << 20


class _RequestError(Exception):
    """A request that is answered with an error, in OpenAI's words."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class AgentEndpoint:
    """One server on a port of its own, for as many episodes as are open."""

    def __init__(self) -> None:
        self._episodes: dict[str, tuple[Episode, str]] = {}
        """Name in the path -> (episode, key)."""
        self._runner: web.AppRunner | None = None
        self._address = ""

    async def start(self, host: str) -> None:
        """Listen. OSError where the address cannot be had."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/episodes/{name}/v1/chat/completions", self._complete)
        app.router.add_get("/episodes/{name}/v1/models", self._models)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, host, 0, backlog=1024).start()
        self._runner = runner
        self._address = f"http://{host}:{runner.addresses[0][1]}"

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def open(self, episode: Episode) -> tuple[str, str]:
        """(base url, key) under which the episode is played."""
        name, key = secrets.token_hex(8), secrets.token_urlsafe(16)
        self._episodes[name] = episode, key
        return f"{self._address}/episodes/{name}/v1", key

    def shut(self, base_url: str) -> None:
        """The episode of that address is over; requests to it are refused."""
        del self._episodes[base_url.split("/")[-2]]

    def _episode(self, request: web.Request) -> Episode:
        episode, key = self._episodes.get(request.match_info["name"], (None, ""))
        if episode is None:
            raise _RequestError(404, "there is no such episode, or it is over", "episode_over")
        given = request.headers.get("Authorization", "")
        if not secrets.compare_digest(given.encode(), f"Bearer {key}".encode()):
            raise _RequestError(401, "the key is not that of this episode", "invalid_api_key")
        return episode

    async def _models(self, request: web.Request) -> web.Response:
        try:
            self._episode(request)
        except _RequestError as error:
            return _error(error)
        model = {"id": MODEL_NAME, "object": "model", "created": 0, "owned_by": "rlkit"}
        return _json({"object": "list", "data": [model]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        try:
            episode = self._episode(request)
            body = _body(await request.read())
            # a task of its own: ending the episode cancels it, and this handler still answers
            reply = await asyncio.create_task(_ask(episode, body))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return _error(_RequestError(503, "the episode is over", "episode_over"))
        except _RequestError as error:
            return _error(error)
        stamp = {"id": f"chatcmpl-{secrets.token_hex(8)}", "created": int(time.time()), "model": MODEL_NAME}
        if body.get("stream"):
            return await _stream(request, reply, stamp, body)
        choice = {"index": 0, "message": on_the_wire(reply.message), "finish_reason": reply.finish_reason}
        return _json({**stamp, "object": "chat.completion", "choices": [choice], "usage": _usage(reply)})


def _body(raw: bytes) -> dict[str, Any]:
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise _RequestError(400, f"the body is not JSON: {error}", "invalid_request") from error
    if not isinstance(body, dict):
        raise _RequestError(400, "the body must be a JSON object", "invalid_request")
    return body


async def _ask(episode: Episode, body: Mapping[str, Any]) -> Reply:
    """The episode's reply; what is wrong with the request, or ends the episode, as an error of the API."""
    if body.get("n") not in (None, 1):
        raise _RequestError(400, f"n = {body['n']}: one reply a request; send several requests", "invalid_request")
    limit = body.get("max_completion_tokens", body.get("max_tokens"))
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise _RequestError(400, f"max_tokens = {limit} must be a whole number of at least 1", "invalid_request")
    stop = body.get("stop") or []
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(item, str) and item for item in stops):
        raise _RequestError(400, "stop must be a string or a list of strings", "invalid_request")
    tools = body.get("tools") or None
    if tools is not None and not isinstance(tools, list):
        raise _RequestError(400, "tools must be a list", "invalid_request")
    try:
        return await episode.complete(read_messages(body.get("messages")), tools, max_tokens=limit, stop=stops)
    except DataError as error:
        raise _RequestError(400, str(error), "invalid_request") from error
    except NoRoomError as error:
        raise _RequestError(400, str(error), "context_length_exceeded") from error
    except TooManyTurnsError as error:
        raise _RequestError(429, str(error), "too_many_turns") from error
    except EpisodeOverError as error:
        raise _RequestError(503, str(error), "episode_over") from error


async def _stream(
    request: web.Request, reply: Reply, stamp: dict[str, Any], body: Mapping[str, Any]
) -> web.StreamResponse:
    """The whole reply as one event, then the reason why it ended: clients that stream get what they expect."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    delta = on_the_wire(reply.message)
    if "tool_calls" in delta:
        delta = {**delta, "tool_calls": [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]}
    chunk = {**stamp, "object": "chat.completion.chunk"}
    events = [
        {**chunk, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**chunk, "choices": [{"index": 0, "delta": {}, "finish_reason": reply.finish_reason}]},
    ]
    if (body.get("stream_options") or {}).get("include_usage"):
        events.append({**chunk, "choices": [], "usage": _usage(reply)})
    for event in events:
        await response.write(b"data: " + orjson.dumps(event) + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def _usage(reply: Reply) -> dict[str, int]:
    return {
        "prompt_tokens": reply.num_prompt_tokens,
        "completion_tokens": reply.num_tokens,
        "total_tokens": reply.num_prompt_tokens + reply.num_tokens,
    }


def _json(value: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json", headers=headers)


def _error(error: _RequestError) -> web.Response:
    told = {"message": str(error), "type": "invalid_request_error", "code": error.code}
    # OpenAI's clients ask again by themselves on 429 and 5xx, unless they are told not to
    return _json({"error": told}, status=error.status, headers={"x-should-retry": "false"})
