"""How an engine process is started. Both engines speak SGLang's native HTTP API, so nothing else about them differs.

`orchestration/engines.py` builds the spec here, starts the process and talks to it through `engines/client.py`.
"""

from dataclasses import dataclass, field
from typing import assert_never

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


def build_launch(cfg: RunConfig, slot: EngineSlot) -> LaunchSpec:
    """The command that starts one engine; `--rollout-engine auto` is resolved here from the device."""
    kind = cfg.engine.rollout_engine
    if kind == "auto":
        kind = "sglang" if slot.device == "cuda" else "embedded"
    match kind:
        case "embedded":
            from rlkit.engines.embedded.launch import embedded_launch

            return embedded_launch(cfg, slot)
        case "sglang":
            from rlkit.engines.sglang.launch import sglang_launch

            return sglang_launch(cfg, slot)
        case _:
            assert_never(kind)


def engine_dtype(cfg: RunConfig, slot: EngineSlot) -> str:
    """`--dtype`, with `auto` resolved by the device: bfloat16 on CUDA, float32 on a CPU."""
    if cfg.model.dtype != "auto":
        return cfg.model.dtype
    return "float32" if slot.device == "cpu" else "bfloat16"
