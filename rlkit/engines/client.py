"""The one HTTP client of SGLang's native API, which both engines speak.

`rollout/` uses it on the router's URL for generation, `sync/` and `orchestration/` on each engine's own URL for
control: the router answers 404 to control calls. Everything that goes wrong is an `EngineError` that names url,
endpoint, status and the beginning of the body; nothing is retried here, so that whoever retries can record it.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

import aiohttp
import orjson

from rlkit.engines.access import call_headers, current_token
from rlkit.engines.wire import (
    generate_body,
    parse_generation,
    parse_load,
    parse_model_info,
    parse_stream_event,
    weight_version_text,
)
from rlkit.types.errors import EngineError, EngineUnavailable
from rlkit.types.generation import EngineLoad, GenerateRequest, Generation, ModelInfo
from rlkit.types.weights import WeightSpec

KEEP_ALIVE_S = 2.0
"""Below the 5 s after which uvicorn closes an idle connection: a call must not pick one that is just being closed."""
ALIVE_TIMEOUT_S = 5.0
BODY_EXCERPT = 500
"""Characters of an error body that an `EngineError` quotes."""

PauseMode = Literal["abort", "retract", "in_place"]


class EngineClient:
    """Async context manager over one base URL (an engine or the router). Bound to the event loop of its first call."""

    def __init__(self, url: str, *, timeout_s: float = 600.0, max_connections: int = 0) -> None:
        """`timeout_s` bounds one whole call; `max_connections` 0 is unlimited."""
        self.url = url.rstrip("/")
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, connect=None)
        self._max_connections = max_connections
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def generate(self, request: GenerateRequest) -> Generation:
        """The whole answer. An aborted request returns its partial tokens with `FinishReason.ABORT`."""
        answer = await self._call("POST", "/generate", generate_body(request, stream=False))
        with self._bad_answer("/generate", answer):
            return parse_generation(answer, request)

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Generation]:
        """Cumulative partial answers (`finish_reason` None); the last one is final."""
        body = orjson.dumps(generate_body(request, stream=True))
        previous: Generation | None = None
        try:
            async with self._open().post(f"{self.url}/generate", data=body, headers=JSON_HEADERS) as response:
                if response.status != 200:
                    raise self._refusal("/generate", response.status, await response.read())
                async for line in _lines(response.content):
                    if not line.startswith(b"data:") or line.rstrip() == b"data: [DONE]":
                        continue
                    with self._bad_answer("/generate", line):
                        previous = parse_stream_event(line, request, previous)
                    yield previous
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._unreachable("/generate", error) from error
        if previous is None or previous.finish_reason is None:
            raise EngineError(f"{self.url}/generate: the stream of request {request.rid} ended before its last event")

    async def model_info(self) -> ModelInfo:
        answer = await self._call("GET", "/model_info")
        with self._bad_answer("/model_info", answer):
            return parse_model_info(answer)

    async def server_info(self) -> dict[str, Any]:
        return self._as_dict("/server_info", await self._call("GET", "/server_info"))

    async def load(self) -> EngineLoad:
        answer = await self._call("GET", "/get_load")
        with self._bad_answer("/get_load", answer):
            return parse_load(answer)

    async def is_alive(self) -> bool:
        """`/model_info` answers within 5 s. Never runs a forward, so it is safe on a sleeping or paused engine."""
        timeout = aiohttp.ClientTimeout(total=ALIVE_TIMEOUT_S)
        try:
            async with self._open().get(f"{self.url}/model_info", timeout=timeout) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def abort(self, rid: str | None) -> None:
        """Stop the request `rid`, and with it every other whose id begins so; None stops all. Their answers keep the
        tokens so far. An id that the engine does not know, or no longer, is ignored."""
        await self._call("POST", "/abort_request", {"rid": rid or "", "abort_all": rid is None})

    async def pause(self, mode: PauseMode) -> None:
        """`abort` ends everything and holds new requests back; `retract` and `in_place` freeze what runs, without and
        with its KV cache."""
        await self._call("POST", "/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        # the engine's own cache of CUDA blocks is left alone: emptying it takes time while requests wait
        await self._call("POST", "/continue_generation", {"torch_empty_cache": False})

    async def flush_cache(self, *, timeout_s: float = 60.0) -> None:
        """Wait until the engine is idle and its prefix cache is empty; EngineError when that does not happen in time.

        An engine refuses while requests run and while another flush waits; both are asked again until the deadline.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            remaining_s = max(deadline - time.monotonic(), 0.1)
            status, body = await self._send("POST", f"/flush_cache?timeout={remaining_s:.3f}", None)
            if status == 200:
                return
            if status != 400 or time.monotonic() + 0.1 > deadline:
                raise self._refusal("/flush_cache", status, body, f"not idle and flushed within {timeout_s:g} s")
            await asyncio.sleep(0.1)

    async def release_memory(self, tags: Sequence[str]) -> None:
        """Put `weights`, `kv_cache`, `cuda_graph` to sleep. The engine must be idle."""
        await self._call("POST", "/release_memory_occupation", {"tags": list(tags)})

    async def resume_memory(self, tags: Sequence[str]) -> None:
        """Map memory again; weights are garbage until the next update."""
        await self._call("POST", "/resume_memory_occupation", {"tags": list(tags)})

    async def init_weights_group(
        self, *, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Join a process group as ranks `rank_offset` and up. Returns once every member has joined."""
        body = {
            "master_address": master_address,
            "master_port": master_port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group_name,
            "backend": backend,
        }
        await self._succeed("/init_weights_update_group", body)

    async def destroy_weights_group(self, *, group_name: str) -> None:
        await self._succeed("/destroy_weights_update_group", {"group_name": group_name})

    async def update_from_tensor(
        self,
        *,
        payloads: Sequence[str],
        version: int,
        flush_cache: bool = False,
        load_format: str | None = "flattened_bucket",
    ) -> None:
        """Load tensors from handles in base64: `payloads[i]` is for tensor-parallel rank i."""
        body = {"serialized_named_tensors": list(payloads), "load_format": load_format}
        await self._succeed("/update_weights_from_tensor", body | _update_fields(version, flush_cache))

    async def update_from_distributed(
        self,
        *,
        specs: Sequence[WeightSpec],
        group_name: str,
        version: int,
        flush_cache: bool = False,
        load_format: str | None = None,
    ) -> None:
        """Receive `specs` by broadcast from rank 0 of the group: one tensor after the other, or all of them as one
        uint8 tensor with `load_format="flattened_bucket"`."""
        body = {
            "names": [spec.name for spec in specs],
            "dtypes": [str(spec.dtype).removeprefix("torch.") for spec in specs],
            "shapes": [list(spec.shape) for spec in specs],
            "group_name": group_name,
            "load_format": load_format,
        }
        await self._succeed("/update_weights_from_distributed", body | _update_fields(version, flush_cache))

    async def update_from_disk(self, *, path: str, version: int, flush_cache: bool = False) -> None:
        """Load a Hugging Face checkpoint folder that the engine can see."""
        await self._succeed("/update_weights_from_disk", {"model_path": path} | _update_fields(version, flush_cache))

    async def set_version(self, version: int) -> None:
        """Stamp the weights that are there; aborts nothing."""
        body = {"new_version": weight_version_text(version), "abort_all_requests": False}
        await self._succeed("/update_weight_version", body)

    async def weights_checker(self, action: str) -> dict[str, Any]:
        """The engine's answer to `checksum`, `snapshot`, `reset_tensors` or `compare`."""
        return await self._succeed("/weights_checker", {"action": action})

    # How a call travels.

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=self._max_connections, keepalive_timeout=KEEP_ALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector, timeout=self._timeout, headers=call_headers())
        return self._session

    async def _send(self, method: str, endpoint: str, body: object) -> tuple[int, bytes]:
        data = None if body is None else orjson.dumps(body)
        try:
            async with self._open().request(
                method, f"{self.url}{endpoint}", data=data, headers=JSON_HEADERS
            ) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._unreachable(endpoint, error) from error

    async def _call(self, method: str, endpoint: str, body: object = None) -> Any:
        """The parsed answer; None where the endpoint answers with an empty body."""
        status, answer = await self._send(method, endpoint, body)
        if status >= 300:
            raise self._refusal(endpoint, status, answer)
        if not answer:
            return None
        try:
            return orjson.loads(answer)
        except orjson.JSONDecodeError as error:
            raise self._refusal(endpoint, status, answer, "the answer is not JSON") from error

    async def _succeed(self, endpoint: str, body: Mapping[str, object]) -> dict[str, Any]:
        """A call whose answer says `success`; a refusal inside a 200 counts as one."""
        answer = self._as_dict(endpoint, await self._call("POST", endpoint, body))
        if answer.get("success") is not True:
            raise EngineError(f"{self.url}{endpoint}: {answer.get('message', answer)}")
        return answer

    def _as_dict(self, endpoint: str, answer: object) -> dict[str, Any]:
        if not isinstance(answer, dict):
            raise EngineError(f"{self.url}{endpoint}: expected a JSON object, got {str(answer)[:BODY_EXCERPT]}")
        return answer

    def _refusal(self, endpoint: str, status: int, body: bytes, reason: str = "") -> EngineError:
        excerpt = body.decode("utf-8", errors="replace")[:BODY_EXCERPT]
        kind = EngineUnavailable if status >= 500 else EngineError
        return kind(f"{self.url}{endpoint}: status {status}{': ' * bool(reason)}{reason}: {excerpt}")

    def _unreachable(self, endpoint: str, error: BaseException) -> EngineError:
        limit = f" after {self._timeout.total:g} s" if isinstance(error, TimeoutError) and self._timeout.total else ""
        return EngineUnavailable(f"{self.url}{endpoint}: no answer{limit}: {type(error).__name__}: {error}")

    def _bad_answer(self, endpoint: str, answer: object) -> "_BadAnswer":
        return _BadAnswer(f"{self.url}{endpoint}", answer)


class RouterClient(EngineClient):
    """sglang-router: everything an engine does for generation, plus its list of workers."""

    async def workers(self) -> list[str]:
        """URLs of the workers that take requests now."""
        return [worker["url"] for worker in await self._workers() if worker.get("is_healthy", True)]

    async def add_worker(self, url: str) -> None:
        """Ask for registration; it happens in the background, see `wait_for_workers`."""
        token = current_token()
        await self._call("POST", "/workers", {"url": url} if token is None else {"url": url, "api_key": token})

    async def remove_worker(self, url: str) -> None:
        """Ask for removal; an unknown url is an EngineError."""
        ids = [worker["id"] for worker in await self._workers() if worker["url"] == url]
        if not ids:
            raise EngineError(f"{self.url}/workers: {url} is not registered")
        await self._call("DELETE", f"/workers/{ids[0]}")

    async def wait_for_workers(self, urls: Iterable[str], timeout_s: float) -> None:
        """Until exactly `urls` are registered and healthy; EngineError with what is missing or too many."""
        wanted, deadline = set(urls), time.monotonic() + timeout_s
        while (present := set(await self.workers())) != wanted:
            if time.monotonic() > deadline:
                raise EngineError(
                    f"{self.url}/workers: after {timeout_s:g} s missing {sorted(wanted - present)}, "
                    f"unexpected {sorted(present - wanted)}"
                )
            await asyncio.sleep(0.1)

    async def _workers(self) -> list[dict[str, Any]]:
        answer = self._as_dict("/workers", await self._call("GET", "/workers"))
        with self._bad_answer("/workers", answer):
            return answer["workers"]


JSON_HEADERS = {"Content-Type": "application/json"}
"""The secret of the run comes on top, see `EngineClient._open`."""


def _update_fields(version: int, flush_cache: bool) -> dict[str, Any]:
    return {
        "weight_version": weight_version_text(version),
        "flush_cache": flush_cache,
        "abort_all_requests": False,
    }


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Lines of any length: aiohttp's own iteration refuses those above its buffer, and one event carries the whole
    answer so far."""
    pieces: list[bytes] = []
    async for chunk in content.iter_any():
        first, *rest = chunk.split(b"\n")
        pieces.append(first)
        for line in rest:
            yield b"".join(pieces)
            pieces = [line]
    if tail := b"".join(pieces):
        yield tail


class _BadAnswer:
    """Context in which an answer is taken apart: whatever is missing or malformed becomes an `EngineError` with the
    answer's beginning."""

    def __init__(self, where: str, answer: object) -> None:
        self._where = where
        self._answer = answer

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> Literal[False]:
        if isinstance(error, (KeyError, TypeError, ValueError, IndexError)) and not isinstance(error, EngineError):
            excerpt = str(self._answer)[:BODY_EXCERPT]
            raise EngineError(f"{self._where}: unusable answer ({type(error).__name__}: {error}): {excerpt}") from error
        if isinstance(error, EngineError) and not str(error).startswith("http"):
            raise EngineError(f"{self._where}: {error}") from error
        return False
