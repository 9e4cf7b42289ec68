"""Inference engines, and how new weights reach them."""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Inference engines and the router in front of them."""

    rollout_engine: Literal["auto", "sglang", "embedded"] = "auto"
    """`auto` takes SGLang where the device is CUDA and the embedded engine otherwise."""
    sglang_server_concurrency: int = 512
    """Most requests in flight per engine."""
    engine_start_timeout_s: float = 600.0
    """Seconds from process start to the first answer of an engine."""
    engine_timeout_s: float = 600.0
    """Seconds for one generation request before it is re-issued."""
    embedded_max_running_requests: int = 64
    """Sequences that the embedded engine decodes together; more wait in its queue."""
    sglang: dict[str, Any] = field(default_factory=dict[str, Any])
    """Pass-through: every `--sglang-NAME VALUE` of the pinned SGLang lands here as NAME -> VALUE."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncConfig:
    """How new weights reach the engines."""

    update_weight_transport: Literal["auto", "ipc", "nccl", "disk"] = "auto"
    """`auto`: shared memory (`ipc`) when colocated, one process group (`nccl`; gloo on a CPU) when split."""
    update_weight_buffer_size: int = 512 * 1024 * 1024
    """Bytes of one bucket."""
    update_weight_disk_dir: str | None = None
    """Folder for the `disk` transport, visible to trainer and engines; unset means the run folder."""
    check_weight_update_equal: bool = False
    """After every update compare checksums of all engine weights with the trainer's."""
