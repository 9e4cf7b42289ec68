"""Inference engines as Ray actors. `EngineServer` owns one server process; `EnginePool` is the driver's handle on all
of them."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray import ObjectRef

from rlkit.config.schema import RunConfig
from rlkit.engines.base import EngineSlot, build_launch
from rlkit.engines.client import EngineClient
from rlkit.orchestration.cluster import ENGINE_SHARE, Cluster
from rlkit.orchestration.layout import EnginePlace, Layout
from rlkit.orchestration.processes import ServerProcess
from rlkit.orchestration.train_workers import claim_output, compute_slots
from rlkit.orchestration.waiting import Waiter
from rlkit.sync.group import free_port
from rlkit.types.errors import EngineError
from rlkit.types.ranks import EngineEndpoint

READY_POLL_S = 0.2


class EngineServer:
    """Starts, probes and stops one engine process on its node.

    A threaded actor, because `watch` blocks while the process lives. One `async def` in here would make it an asyncio
    actor instead, whose methods all share one thread.
    """

    def __init__(self, cfg: RunConfig, run_dir: Path, index: int) -> None:
        claim_output(run_dir, f"engine{index}_actor")
        self._cfg = cfg
        self._log_path = run_dir / "logs" / f"engine{index}.log"
        self._index = index
        self._process: ServerProcess | None = None

    def start(
        self, *, host: str, num_gpus: int, base_gpu_id: int, device: str, num_threads: int, weight_version: int
    ) -> str:
        """Launch the engine on this node's address `host` and wait until it answers; returns its URL."""
        port = free_port(host)
        slot = EngineSlot(
            index=self._index,
            host=host,
            port=port,
            num_gpus=num_gpus,
            base_gpu_id=base_gpu_id,
            device=device,
            num_threads=num_threads,
            weight_version=weight_version,
            seed=self._cfg.data.rollout_seed + self._index,
        )
        spec = build_launch(self._cfg, slot)
        self._process = ServerProcess(spec.argv, env=spec.env, log_path=self._log_path)
        url = f"http://{host}:{port}"
        asyncio.run(
            wait_until_ready(url, self._process, self._index, timeout_s=self._cfg.engine.engine_start_timeout_s)
        )
        return url

    def watch(self) -> str:
        """Blocks while the process lives; then says how it ended."""
        assert self._process is not None
        status = self._process.wait()
        return f"exit status {status}; the end of {self._log_path}:\n{self._process.tail()}"

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()


async def wait_until_ready(url: str, process: ServerProcess, index: int, *, timeout_s: float) -> None:
    """Until the engine answers; EngineError with the end of its log when it ends or takes too long."""
    deadline = time.monotonic() + timeout_s
    async with EngineClient(url, timeout_s=30.0) as client:
        while not await client.is_alive():
            if process.exit_status() is not None:
                raise EngineError(
                    f"engine {index} ended with status {process.exit_status()} while starting; "
                    f"the end of {process.log_path}:\n{process.tail()}"
                )
            if time.monotonic() > deadline:
                raise EngineError(
                    f"engine {index} did not answer within {timeout_s:.0f} s (--engine-start-timeout-s); "
                    f"the end of {process.log_path}:\n{process.tail()}"
                )
            await asyncio.sleep(READY_POLL_S)


RemoteEngineServer: Any = ray.remote(EngineServer)


class EnginePool:
    """All engines of a run."""

    def __init__(self, cfg: RunConfig, cluster: Cluster, layout: Layout, *, run_dir: Path, waiter: Waiter) -> None:
        self._cfg = cfg
        self._cluster = cluster
        self._layout = layout
        self._waiter = waiter
        self._num_threads = cluster.threads_per_slot(compute_slots(cfg, layout))
        self._servers: list[Any] = [
            RemoteEngineServer.options(
                max_concurrency=4,
                **cluster.actor_options(engine.slots[0], share=ENGINE_SHARE, num_threads=self._num_threads),
            ).remote(cfg, run_dir, engine.index)
            for engine in layout.engines
        ]

    def start(self, weight_version: int) -> list[ObjectRef]:
        """Begin starting every engine; `endpoints` waits for them."""
        return [
            server.start.remote(
                host=self._cluster.slots[engine.slots[0]].node_ip,
                num_gpus=len(engine.slots),
                base_gpu_id=self._cluster.slots[engine.slots[0]].gpu_id,
                device=self._cluster.device,
                num_threads=self._num_threads,
                weight_version=weight_version,
            )
            for engine, server in zip(self._layout.engines, self._servers, strict=True)
        ]

    def endpoints(self, started: Sequence[ObjectRef]) -> list[EngineEndpoint]:
        urls = self._waiter.gather(started, who="the actor of engine")
        return [self._endpoint(engine, url) for engine, url in zip(self._layout.engines, urls, strict=True)]

    def _endpoint(self, engine: EnginePlace, url: str) -> EngineEndpoint:
        return EngineEndpoint(
            index=engine.index,
            url=url,
            num_gpus=len(engine.slots),
            colocated_ranks=self._layout.colocated_ranks(engine),
        )

    def watch(self) -> dict[ObjectRef, str]:
        """A task per engine that ends only when the engine does."""
        return {server.watch.remote(): f"engine {index}" for index, server in enumerate(self._servers)}

    def close(self) -> None:
        """Stop every server process and wait until they are gone. A dead actor's process has ended with it."""
        stops = [server.stop.remote() for server in self._servers]
        ray.wait(stops, num_returns=len(stops), timeout=15.0) if stops else None
        for server in self._servers:
            ray.kill(server)
