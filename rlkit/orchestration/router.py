"""The sglang-router process in front of the engines."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlkit.config.schema import RunConfig
from rlkit.engines.access import module_command
from rlkit.engines.base import free_port
from rlkit.engines.client import RouterClient
from rlkit.orchestration.processes import ServerProcess
from rlkit.types.errors import EngineError

READY_TIMEOUT_S = 120.0


def start_router(cfg: RunConfig, host: str, log_dir: Path) -> tuple[ServerProcess, str]:
    """Start the router on `host`; returns the process and its URL. Workers are added by the caller."""
    port, metrics_port = free_port(host), free_port(host)
    argv = module_command("sglang_router.launch_router")
    options: Mapping[str, object] = {
        "host": host,
        "port": port,
        "policy": cfg.engine.router_policy,
        "worker-startup-check-interval": 1,
        "request-timeout-secs": int(cfg.engine.engine_timeout_s),
        "max-concurrent-requests": -1,
        "log-level": "warn",
        "prometheus-host": "127.0.0.1",
        "prometheus-port": metrics_port,
    }
    for name, value in options.items():
        argv += [f"--{name}", str(value)]
    # Requests are re-issued by the client, so that the ledger sees it; engines are watched by the run, not by the
    # router.
    argv += ["--disable-retries", "--disable-health-check", "--disable-circuit-breaker"]
    process = ServerProcess(argv, env={"CUDA_VISIBLE_DEVICES": ""}, log_path=log_dir / "router.log")
    return process, f"http://{host}:{port}"


def register_engines(url: str, engine_urls: Sequence[str], process: ServerProcess) -> None:
    """Add every engine to a router that has just been started, and wait until it routes to all of them."""

    async def register() -> None:
        async with RouterClient(url, timeout_s=30.0) as router:
            await wait_until_listening(router, process)
            for engine_url in engine_urls:
                await router.add_worker(engine_url)
            await router.wait_for_workers(engine_urls, timeout_s=READY_TIMEOUT_S)

    asyncio.run(register())


def remove_worker(url: str, engine_url: str) -> None:
    """Stop routing to an engine that is gone; nothing to do where the router does not know it."""

    async def remove() -> None:
        async with RouterClient(url, timeout_s=30.0) as router:
            if engine_url in await router.workers():
                await router.remove_worker(engine_url)

    asyncio.run(remove())


def add_worker(url: str, engine_url: str) -> None:
    """Route to one more engine; returns when requests may reach it."""

    async def add() -> None:
        async with RouterClient(url, timeout_s=30.0) as router:
            await router.add_worker(engine_url)
            deadline = time.monotonic() + READY_TIMEOUT_S
            while engine_url not in await router.workers():
                if time.monotonic() > deadline:
                    raise EngineError(f"{url}/workers: {engine_url} is not routed to after {READY_TIMEOUT_S:.0f} s")
                await asyncio.sleep(0.1)

    asyncio.run(add())


async def wait_until_listening(router: RouterClient, process: ServerProcess) -> None:
    """Until the router answers; EngineError with the end of its log when it ends or takes too long."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while True:
        try:
            await router.workers()
            return
        except EngineError as error:
            if process.exit_status() is not None or time.monotonic() > deadline:
                raise EngineError(
                    f"the router did not start; the end of {process.log_path}:\n{process.tail()}"
                ) from error
        await asyncio.sleep(0.1)
