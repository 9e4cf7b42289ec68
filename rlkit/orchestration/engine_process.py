"""One engine process on one node, as a Ray actor.

An engine takes longest of all to start, so nothing heavy is imported before it is launched: the HTTP client, and torch
with it, follow while the engine is importing too.
"""

import asyncio
import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray

from rlkit.config.schema import RunConfig
from rlkit.engines.access import use_token
from rlkit.engines.base import EngineSlot, build_launch, free_port
from rlkit.orchestration.engine_death import advice_on_death, telling_part
from rlkit.orchestration.processes import ServerProcess
from rlkit.orchestration.worker_output import claim_output
from rlkit.types.errors import EngineError

logger = logging.getLogger(__name__)

READY_POLL_S = 0.2
LINES_TO_SEARCH = 300
"""Of a dead engine's log, for the cause: SGLang's processes go on talking after one of them has failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnginePart:
    """The part of an engine that lies on one node; most engines have one."""

    host: str
    num_gpus: int
    """GPUs of the whole engine, on all its nodes."""
    base_gpu_id: int
    device: str
    num_threads: int
    num_nodes: int = 1
    node_rank: int = 0
    dist_init_addr: str | None = None


class EngineServer:
    """Starts, probes, restarts and stops one engine process on its node.

    A threaded actor, because `watch` blocks while the process lives. One `async def` in here would make it an asyncio
    actor instead, whose methods all share one thread.
    """

    def __init__(
        self, cfg: RunConfig, run_dir: Path, index: int, node_rank: int = 0, *, token: str | None = None
    ) -> None:
        use_token(token)
        part = f"_node{node_rank}" if node_rank else ""
        claim_output(run_dir, f"engine{index}{part}_actor")
        self._cfg = cfg
        self._log_path = run_dir / "logs" / f"engine{index}{part}.log"
        self._index = index
        self._process: ServerProcess | None = None
        self._slot: EngineSlot | None = None
        self._max_total_tokens: int | None = None

    def meeting_place(self, host: str) -> str:
        """`host:port` where the parts of an engine meet, asked of the first one's node."""
        return f"{host}:{free_port(host)}"

    def start(self, part: EnginePart, *, weight_version: int) -> str:
        """Launch the engine on this node and wait until it answers; returns its URL. A part on a further node is only
        launched: the first one answers once all have met.
        """
        slot = EngineSlot(
            index=self._index,
            host=part.host,
            port=free_port(part.host),
            num_gpus=part.num_gpus,
            base_gpu_id=part.base_gpu_id,
            device=part.device,
            num_threads=part.num_threads,
            weight_version=weight_version,
            seed=self._cfg.data.rollout_seed + self._index,
            num_nodes=part.num_nodes,
            node_rank=part.node_rank,
            dist_init_addr=part.dist_init_addr,
        )
        return self._launch(slot)

    def restart(self, *, weight_version: int) -> str:
        """Launch it again after it has died, at another port and with a KV cache of the same size; returns its new URL.

        Its weights are those of `--hf-checkpoint` whatever the version says: load the current ones before use.
        """
        assert self._slot is not None and self._slot.num_nodes == 1
        self.stop()
        port = free_port(self._slot.host)
        slot = replace(self._slot, port=port, weight_version=weight_version, max_total_tokens=self._max_total_tokens)
        return self._launch(slot)

    def _launch(self, slot: EngineSlot) -> str:
        began = time.monotonic()
        spec = build_launch(self._cfg, slot)
        self._slot = slot
        self._process = ServerProcess(spec.argv, env=spec.env, log_path=self._log_path)
        logger.info(f"engine {self._index}: {' '.join(spec.argv)}")
        url = f"http://{slot.host}:{slot.port}"
        if slot.node_rank > 0:
            return url
        tokens = asyncio.run(
            wait_until_ready(url, self._process, self._index, timeout_s=self._cfg.engine.engine_start_timeout_s)
        )
        if self._cfg.cluster.colocate and self._max_total_tokens is None:
            self._max_total_tokens = tokens
        logger.info(f"engine {self._index} answers at {url} after {time.monotonic() - began:.1f} s")
        return url

    def watch(self) -> str:
        """Blocks while the process lives; then says how it ended."""
        assert self._process is not None
        status = self._process.wait()
        return end_of(self._process, f"exit status {status}")

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()


RemoteEngineServer: Any = ray.remote(EngineServer)


async def wait_until_ready(url: str, process: ServerProcess, index: int, *, timeout_s: float) -> int | None:
    """Until the engine answers; returns the tokens that its KV cache holds, where it says so. EngineError with the end
    of its log when it ends or takes too long.
    """
    from rlkit.engines.client import EngineClient  # local: torch, while the engine starts

    deadline = time.monotonic() + timeout_s
    async with EngineClient(url, timeout_s=30.0) as client:
        while not await client.is_alive():
            status = process.exit_status()
            if status is not None:
                raise EngineError(end_of(process, f"engine {index} ended with status {status} while starting"))
            if time.monotonic() > deadline:
                late = f"engine {index} did not answer within {timeout_s:.0f} s (--engine-start-timeout-s)"
                raise EngineError(end_of(process, late))
            await asyncio.sleep(READY_POLL_S)
        tokens = (await client.server_info()).get("max_total_num_tokens")
        return int(tokens) if tokens is not None else None


def end_of(process: ServerProcess, what: str) -> str:
    """`what` happened, the end of the log, and what would help where the log tells."""
    log = process.tail(LINES_TO_SEARCH)
    return f"{what}; the end of {process.log_path}:\n{telling_part(log)}{advice_on_death(log)}"
