"""All engines of a run, as the driver sees them: `EnginePool` for those that it starts, `attach` for those that run
already."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray import ObjectRef

from rlkit.config.schema import RunConfig
from rlkit.engines.access import current_token
from rlkit.engines.client import EngineClient
from rlkit.orchestration.cluster import ENGINE_SHARE, Cluster
from rlkit.orchestration.engine_process import EnginePart, RemoteEngineServer
from rlkit.orchestration.layout import EnginePlace, Layout
from rlkit.orchestration.train_workers import compute_slots
from rlkit.orchestration.waiting import Waiter
from rlkit.types.errors import EngineError, PlacementError
from rlkit.types.ranks import EngineEndpoint

WHO = "the actor of engine"


class EnginePool:
    """The engine processes of a run: one actor for each node that an engine touches."""

    def __init__(self, cfg: RunConfig, cluster: Cluster, layout: Layout, *, run_dir: Path, waiter: Waiter) -> None:
        self._cfg = cfg
        self._cluster = cluster
        self._layout = layout
        self._waiter = waiter
        self._num_threads = cluster.threads_per_slot(compute_slots(cfg, layout))
        node_ids = [slot.node_id for slot in cluster.slots]
        self._nodes = [slots_by_node(engine.slots, node_ids) for engine in layout.engines]
        self._servers: list[list[Any]] = [
            [
                RemoteEngineServer.options(
                    max_concurrency=4,
                    **cluster.actor_options(slots[0], share=ENGINE_SHARE, num_threads=self._num_threads),
                ).remote(cfg, run_dir, engine.index, node_rank, token=current_token())
                for node_rank, slots in enumerate(nodes)
            ]
            for engine, nodes in zip(layout.engines, self._nodes, strict=True)
        ]

    def start(self, weight_version: int) -> list[ObjectRef]:
        """Begin starting every engine; `endpoints` waits for them."""
        return [self._start(index, weight_version) for index in range(len(self._servers))]

    def _start(self, index: int, weight_version: int) -> ObjectRef:
        nodes, servers = self._nodes[index], self._servers[index]
        first = self._cluster.slots[nodes[0][0]].node_ip
        meeting_place = None
        if len(nodes) > 1:
            meeting_place = self._waiter.gather([servers[0].meeting_place.remote(first)], who=WHO)[0]
        started = [
            server.start.remote(
                EnginePart(
                    host=self._cluster.slots[slots[0]].node_ip,
                    num_gpus=sum(len(part) for part in nodes),
                    base_gpu_id=self._cluster.slots[slots[0]].gpu_id,
                    device=self._cluster.device,
                    num_threads=self._num_threads,
                    num_nodes=len(nodes),
                    node_rank=node_rank,
                    dist_init_addr=meeting_place,
                ),
                weight_version=weight_version,
            )
            for node_rank, (slots, server) in enumerate(zip(nodes, servers, strict=True))
        ]
        return started[0]

    def endpoints(self, started: Sequence[ObjectRef]) -> list[EngineEndpoint]:
        urls = self._waiter.gather(started, who=WHO, doing="starting the engines")
        return [self._endpoint(engine, url) for engine, url in zip(self._layout.engines, urls, strict=True)]

    def _endpoint(self, engine: EnginePlace, url: str) -> EngineEndpoint:
        return EngineEndpoint(
            index=engine.index,
            url=url,
            num_gpus=len(engine.slots),
            colocated_ranks=self._layout.colocated_ranks(engine),
        )

    def watch(self) -> dict[ObjectRef, str]:
        """A task per process that ends only when the process does, and the engine's name."""
        return {
            server.watch.remote(): engine_name(index)
            for index, servers in enumerate(self._servers)
            for server in servers
        }

    def restart(self, endpoint: EngineEndpoint, weight_version: int) -> tuple[EngineEndpoint, dict[ObjectRef, str]]:
        """Start a dead engine again and wait for it: where it is now, and its watch task. Its weights are not the
        trainer's yet.
        """
        (server,) = self._servers[endpoint.index]
        starting = [server.restart.remote(weight_version=weight_version)]
        url = self._waiter.gather(starting, who=WHO, doing=f"restarting {engine_name(endpoint.index)}")[0]
        return replace(endpoint, url=url), {server.watch.remote(): engine_name(endpoint.index)}

    def close(self) -> None:
        """Stop every server process and wait until they are gone. A dead actor's process has ended with it."""
        servers = [server for parts in self._servers for server in parts]
        stops = [server.stop.remote() for server in servers]
        ray.wait(stops, num_returns=len(stops), timeout=15.0) if stops else None
        for server in servers:
            ray.kill(server)


def engine_name(index: int) -> str:
    return f"engine {index}"


def slots_by_node(slots: Sequence[int], node_ids: Sequence[str]) -> list[tuple[int, ...]]:
    """An engine's slots, node by node in order. PlacementError unless every node holds equally many of them."""
    nodes: dict[str, list[int]] = {}
    for slot in slots:
        nodes.setdefault(node_ids[slot], []).append(slot)
    parts = [tuple(part) for part in nodes.values()]
    if len({len(part) for part in parts}) > 1:
        raise PlacementError(
            f"an engine of {len(slots)} GPUs would have {' + '.join(str(len(part)) for part in parts)} of them on its "
            "nodes, but needs equally many on each; choose --rollout-num-gpus-per-engine so that it divides a node or "
            "is a multiple of it"
        )
    return parts


def attach(addresses: Sequence[str], *, timeout_s: float) -> list[EngineEndpoint]:
    """Endpoints of engines that run already, at `host:port`. EngineError for one that does not answer, or whose weight
    version is not a number.
    """

    async def look() -> list[EngineEndpoint]:
        return [await _look(index, address) for index, address in enumerate(addresses)]

    async def _look(index: int, address: str) -> EngineEndpoint:
        async with EngineClient(f"http://{address}", timeout_s=timeout_s) as client:
            try:
                await client.model_info()
                info = await client.server_info()
            except EngineError as error:
                raise EngineError(
                    f"--rollout-external-engine-addrs {address} cannot be used: {error}. It has to run an engine that "
                    "was started with --weight-version 0"
                ) from error
        num_gpus = int(info.get("tp_size", 1)) * int(info.get("pp_size", 1))
        return EngineEndpoint(index=index, url=client.url, num_gpus=num_gpus, colocated_ranks=())

    return asyncio.run(look())
