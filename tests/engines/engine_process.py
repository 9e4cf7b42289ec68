"""Engines and routers as processes for the tests, started by the commands that rlkit itself uses."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from rlkit.config.schema import ClusterConfig, EngineConfig, ModelConfig, RunConfig, SyncConfig
from rlkit.engines.base import EngineSlot, build_launch
from rlkit.engines.client import EngineClient, RouterClient
from rlkit.types.generation import GenerateRequest, Generation

START_TIMEOUT_S = 480.0
FIRST_VERSION = 7

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RunningEngine:
    """One engine behind a router of its own."""

    kind: Literal["embedded", "sglang"]
    device: Literal["cpu", "cuda"]
    url: str
    router_url: str
    folder: Path
    log_path: Path

    def run(self, body: Callable[[RouterClient, EngineClient], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine function with the router's client and the engine's own."""

        async def connected() -> T:
            async with (
                RouterClient(self.router_url, timeout_s=60.0) as router,
                EngineClient(self.url, timeout_s=60.0) as engine,
            ):
                return await asyncio.wait_for(body(router, engine), timeout=120.0)

        return asyncio.run(connected())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def process(argv: list[str], *, env: Mapping[str, str | None], log_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A child that ends with the block, or with this process in whatever way it ends."""
    merged = {key: value for key, value in (os.environ | env).items() if value is not None}
    with log_path.open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "rlkit.orchestration.guardian", *argv],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=merged,
            start_new_session=True,
        )
    try:
        yield child
    finally:
        child.terminate()
        child.wait(20.0)
        assert child.stdin is not None
        child.stdin.close()


def wait_until(ready: Callable[[], bool], *, child: subprocess.Popen[bytes], log_path: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not ready():
        if child.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(
                f"{log_path.name} is not ready (exit status {child.poll()}):\n{log_path.read_text()[-4000:]}"
            )
        time.sleep(0.1)


@contextmanager
def running_router(directory: Path) -> Iterator[str]:
    port, log_path = free_port(), directory / "router.log"
    argv = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--policy", "round_robin", "--worker-startup-check-interval", "1", "--log-level", "warn"]
    argv += ["--disable-retries", "--disable-health-check", "--disable-circuit-breaker"]
    argv += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
    url = f"http://127.0.0.1:{port}"
    with process(argv, env={}, log_path=log_path) as child:
        wait_until(lambda: is_listening(port), child=child, log_path=log_path)
        yield url


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def running_engine(
    kind: Literal["embedded", "sglang"],
    folder: Path,
    directory: Path,
    *,
    device: Literal["cpu", "cuda"] = "cpu",
    max_running: int = 64,
    pause_mode: Literal["abort", "retract"] = "abort",
) -> Iterator[RunningEngine]:
    """The engine that `build_launch` starts for a colocated run in float32, registered with a router."""
    cfg = RunConfig(
        sync=SyncConfig(pause_generation_mode=pause_mode),
        model=ModelConfig(hf_checkpoint=str(folder), dtype="float32"),
        cluster=ClusterConfig(colocate=True),
        engine=EngineConfig(rollout_engine=kind, embedded_max_running_requests=max_running),
    )
    slot = EngineSlot(
        index=0,
        host="127.0.0.1",
        port=free_port(),
        num_gpus=1,
        base_gpu_id=0,
        device=device,
        num_threads=1,
        weight_version=FIRST_VERSION,
        seed=1,
    )
    spec = build_launch(cfg, slot)
    url, log_path = f"http://127.0.0.1:{slot.port}", directory / f"{kind}.log"
    with (
        process(spec.argv, env=spec.env, log_path=log_path) as child,
        running_router(directory) as router_url,
    ):
        engine = RunningEngine(
            kind=kind, device=device, url=url, router_url=router_url, folder=folder, log_path=log_path
        )
        wait_until(lambda: asyncio.run(_is_alive(url)), child=child, log_path=log_path)
        engine.run(_register(url))
        yield engine


async def _is_alive(url: str) -> bool:
    async with EngineClient(url) as client:
        return await client.is_alive()


def _register(url: str) -> Callable[[RouterClient, EngineClient], Coroutine[Any, Any, None]]:
    async def register(router: RouterClient, _: EngineClient) -> None:
        await router.add_worker(url)
        await router.wait_for_workers([url], timeout_s=60.0)

    return register


async def eventually(check: Callable[[], Awaitable[bool]], *, timeout_s: float = 20.0) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + timeout_s
    while not await check():
        assert time.monotonic() < deadline, f"did not happen within {timeout_s} s"
        await asyncio.sleep(0.02)


@asynccontextmanager
async def generating(router, *requests: GenerateRequest) -> AsyncIterator[list[asyncio.Task[Generation]]]:
    """Requests in flight, each of which has produced tokens. Those still running at the end are cancelled."""

    async def watched(request: GenerateRequest, started: asyncio.Event) -> Generation:
        newest = None
        async for newest in router.stream(request):
            if len(newest.output_ids) >= 3:
                started.set()
        assert newest is not None
        return newest

    events = [asyncio.Event() for _ in requests]
    tasks = [asyncio.create_task(watched(*pair)) for pair in zip(requests, events, strict=True)]
    await asyncio.wait_for(asyncio.gather(*(event.wait() for event in events)), 60.0)
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
