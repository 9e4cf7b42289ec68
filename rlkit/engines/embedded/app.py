"""HTTP routes of the embedded engine: SGLang's native API, its names, methods, status codes and error shapes.

`/generate` is a plain route, because it is hot; the bodies of control calls are pydantic models. Handlers only
translate: the work is done by `engine.py` on its own thread.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from rlkit.engines.access import is_allowed
from rlkit.engines.embedded.service import Service, bad_request_response, error_response, json_response
from rlkit.engines.embedded.weight_payload import read_payload, receive
from rlkit.engines.wire import parse_weight_version
from rlkit.types.errors import EngineError

HEALTH_TIMEOUT_S = 20.0
GET_OR_POST = ["GET", "POST"]


class UpdateBody(BaseModel):
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class TensorUpdate(UpdateBody):
    serialized_named_tensors: list[str]
    load_format: str | None = None


class DistributedUpdate(UpdateBody):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"
    load_format: str | None = None


class DiskUpdate(UpdateBody):
    model_path: str


class GroupBody(BaseModel):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"


class GroupName(BaseModel):
    group_name: str = "weight_update_group"


class VersionBody(BaseModel):
    new_version: str
    abort_all_requests: bool = True


class AbortBody(BaseModel):
    rid: str | None = None
    abort_all: bool = False


class PauseBody(BaseModel):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class TagsBody(BaseModel):
    tags: list[str] | None = None


class CheckBody(BaseModel):
    action: str = "checksum"


async def _refused(_: Request, error: Exception) -> Response:
    return error_response(str(error), 400)


async def _invalid(_: Request, error: Exception) -> Response:
    return bad_request_response(str(error))


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = error.status_code
    return json_response(
        {"object": "error", "message": error.detail, "type": str(code), "param": None, "code": code}, code
    )


def create_app(service: Service, *, on_start: Callable[[], Awaitable[None]]) -> FastAPI:
    """The application; `on_start` runs in the event loop before the first request."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await on_start()
        yield

    app = FastAPI(openapi_url=None, lifespan=lifespan)
    app.add_exception_handler(EngineError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.router.add_route("/generate", service.generate, methods=["POST", "PUT"])
    _add_info_routes(app, service)
    _add_flow_routes(app, service)
    _add_memory_routes(app, service)
    _add_group_routes(app, service)
    _add_update_routes(app, service)
    app.add_middleware(_OnlyOurs)
    return app


class _OnlyOurs:
    """Turns away requests without the run's secret, before anything of them is read."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not is_allowed(scope["path"], Headers(scope=scope)):
            await json_response({"error": "Unauthorized"}, 401)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _add_info_routes(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    @app.get("/ping")
    async def health() -> Response:
        return Response()

    @app.get("/health_generate")
    async def health_generate() -> Response:
        """Generate one token, unless that cannot work now."""
        if service.engine.is_paused or service.engine.asleep:
            return Response(status_code=503)
        request = service.reader.read(
            {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}}
        )
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                async for _ in service.outputs(request):
                    pass
        except TimeoutError:
            return Response(status_code=503)
        return Response(status_code=200 if len(request.output_ids) == 1 else 503)

    @app.get("/model_info")
    @app.get("/get_model_info")
    async def model_info() -> Response:
        return json_response(service.model_info | {"weight_version": service.engine.weight_version})

    @app.get("/server_info")
    @app.get("/get_server_info")
    async def server_info() -> Response:
        state = {
            "weight_version": service.engine.weight_version,
            "is_paused": service.engine.is_paused,
            "released_memory": sorted(service.engine.asleep),
            "kv_cache_bytes": service.engine.runner.cache.num_bytes,
        }
        return json_response(
            service.server_info | {"weight_version": service.engine.weight_version, "internal_states": [state]}
        )

    @app.get("/get_load")
    async def get_load() -> Response:
        num_running, num_waiting, num_tokens = service.engine.load()
        load = {
            "dp_rank": 0,
            "num_reqs": num_running + num_waiting,
            "num_waiting_reqs": num_waiting,
            "num_tokens": num_tokens,
            "num_pending_tokens": 0,
        }
        return json_response([load])


def _add_flow_routes(app: FastAPI, service: Service) -> None:
    @app.post("/abort_request")
    async def abort_request(body: AbortBody) -> Response:
        if body.abort_all:
            await service.call(lambda: service.engine.abort(lambda _: True))
        elif body.rid:
            await service.abort(body.rid)
        return Response()

    @app.post("/pause_generation")
    async def pause_generation(body: PauseBody | None = None) -> Response:
        mode = (body or PauseBody()).mode
        await service.call(lambda: service.engine.pause(mode))
        return json_response({"message": "Generation paused successfully.", "status": "ok"})

    @app.post("/continue_generation")
    async def continue_generation() -> Response:
        await service.call(service.engine.resume)
        return json_response({"message": "Generation continued successfully.", "status": "ok"})

    @app.api_route("/flush_cache", methods=GET_OR_POST)
    async def flush_cache(timeout: float = 0.0) -> Response:
        flushed = await service.call(lambda: service.engine.flush_cache(timeout))
        try:
            await asyncio.wrap_future(flushed)
        except EngineError as error:
            return Response(f"{error}\n", status_code=400)
        return Response("Cache flushed.\n")


def _add_memory_routes(app: FastAPI, service: Service) -> None:
    @app.api_route("/release_memory_occupation", methods=GET_OR_POST)
    async def release_memory_occupation(body: TagsBody | None = None) -> Response:
        await service.call(lambda: service.engine.release_memory(body.tags if body else None))
        return json_response(None)

    @app.api_route("/resume_memory_occupation", methods=GET_OR_POST)
    async def resume_memory_occupation(body: TagsBody | None = None) -> Response:
        await service.call(lambda: service.engine.resume_memory(body.tags if body else None))
        return json_response(None)


def _add_group_routes(app: FastAPI, service: Service) -> None:
    @app.post("/init_weights_update_group")
    async def init_weights_update_group(body: GroupBody) -> Response:
        return await _report(
            service,
            lambda: service.groups.join(
                name=body.group_name,
                address=body.master_address,
                port=body.master_port,
                rank=body.rank_offset,
                world_size=body.world_size,
                backend=body.backend,
            ),
            "Succeeded to initialize custom process group.",
        )

    @app.post("/destroy_weights_update_group")
    async def destroy_weights_update_group(body: GroupName) -> Response:
        return await _report(
            service, lambda: service.groups.leave(body.group_name), "Succeeded to destroy custom process group."
        )


def _add_update_routes(app: FastAPI, service: Service) -> None:
    @app.post("/update_weights_from_tensor")
    async def update_weights_from_tensor(body: TensorUpdate) -> Response:
        def load() -> None:
            service.engine.weights.load_all(read_payload(body.serialized_named_tensors, body.load_format))

        return await _update(service, body, load)

    @app.post("/update_weights_from_distributed")
    async def update_weights_from_distributed(body: DistributedUpdate) -> Response:
        def load() -> None:
            received = receive(
                names=body.names,
                dtypes=body.dtypes,
                shapes=body.shapes,
                load_format=body.load_format,
                group=service.groups.get(body.group_name),
                device=service.engine.runner.device,
            )
            service.engine.weights.load_all(received)

        return await _update(service, body, load)

    @app.post("/update_weights_from_disk")
    async def update_weights_from_disk(body: DiskUpdate) -> Response:
        response = await _update(service, body, lambda: service.engine.weights.load_folder(Path(body.model_path)))
        if response.status_code == 200:
            service.model_info["model_path"] = body.model_path
        return response

    @app.post("/update_weight_version")
    async def update_weight_version(body: VersionBody) -> Response:
        def set_version() -> None:
            parse_weight_version(body.new_version)
            if body.abort_all_requests:
                service.engine.abort(lambda _: True)
            service.engine.weight_version = body.new_version

        extra = {"new_version": body.new_version}
        return await _report(service, set_version, f"Weight version updated to {body.new_version}", extra)

    @app.api_route("/weights_checker", methods=GET_OR_POST)
    async def weights_checker(body: CheckBody | None = None) -> Response:
        action = (body or CheckBody()).action
        try:
            ranks = await service.call(lambda: service.engine.check_weights(action))
        except EngineError as error:
            return json_response({"success": False, "message": str(error)}, 400)
        return json_response({"success": True, "message": "Success."} | ranks)


async def _update(service: Service, body: UpdateBody, load: Callable[[], None]) -> Response:
    return await service.update(
        load, version=body.weight_version, flush_cache=body.flush_cache, abort_all=body.abort_all_requests
    )


async def _report(
    service: Service, run: Callable[[], None], message: str, extra: dict[str, Any] | None = None
) -> Response:
    """Run on the engine thread; answer with `success` and a message, 400 on an EngineError."""
    try:
        await service.call(run)
    except EngineError as error:
        return json_response({"success": False, "message": str(error)}, 400)
    return json_response({"success": True, "message": message} | (extra or {}))
