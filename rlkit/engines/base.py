"""How an engine process is started. Both engines speak SGLang's native HTTP API, so nothing else about them differs.

`orchestration/engine_process.py` builds the spec here, starts the process and talks to it through `engines/client.py`.
Nothing in here needs torch: an engine is launched while its parent still imports.
"""

import socket
from dataclasses import dataclass, field
from typing import Literal, assert_never

from rlkit.config.schema import RunConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSpec:
    """A command line and the environment that it adds to (or, with None, removes from) the parent's."""

    argv: list[str]
    env: dict[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSlot:
    """Where one engine goes."""

    index: int
    host: str
    port: int
    num_gpus: int
    base_gpu_id: int
    """Plain CUDA index of its first GPU on the node."""
    device: str
    num_threads: int
    """Intra-op threads on a CPU."""
    weight_version: int
    seed: int
    num_nodes: int = 1
    """Nodes that the engine spans; this process is for one of them."""
    node_rank: int = 0
    dist_init_addr: str | None = None
    """`host:port` on the first node where the processes of one engine meet; None on a single node."""
    max_total_tokens: int | None = None
    """Size of the KV cache of the engine's first start: a restarted one must not measure a GPU that is in use."""


def free_port(host: str) -> int:
    """A port that was free a moment ago on `host`."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def build_launch(cfg: RunConfig, slot: EngineSlot) -> LaunchSpec:
    """The command that starts one engine; `--rollout-engine auto` is resolved here from the device."""
    kind = engine_kind(cfg, slot.device)
    match kind:
        case "embedded":
            from rlkit.engines.embedded.launch import embedded_launch

            return embedded_launch(cfg, slot)
        case "sglang":
            from rlkit.engines.sglang.launch import sglang_launch

            return sglang_launch(cfg, slot)
        case _:
            assert_never(kind)


def engine_kind(cfg: RunConfig, device: str) -> Literal["sglang", "embedded"]:
    """`--rollout-engine`, with `auto` resolved by the device: SGLang on CUDA, the embedded engine on a CPU."""
    if cfg.engine.rollout_engine != "auto":
        return cfg.engine.rollout_engine
    return "sglang" if device == "cuda" else "embedded"


def engine_dtype(cfg: RunConfig, slot: EngineSlot) -> str:
    """`--dtype`, with `auto` resolved by the device: bfloat16 on CUDA, float32 on a CPU."""
    if cfg.dtype_name != "auto":
        return cfg.dtype_name
    return "float32" if slot.device == "cpu" else "bfloat16"
