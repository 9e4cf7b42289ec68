"""Inference engines, and how new weights reach them."""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Inference engines and the router in front of them."""

    rollout_engine: Literal["auto", "sglang", "embedded"] = "auto"
    """`auto` takes SGLang where the device is CUDA and the embedded engine otherwise."""
    router_policy: Literal["round_robin", "random", "power_of_two", "cache_aware"] = "round_robin"
    """Which engine the router gives a request. `cache_aware` keeps requests of one prompt together, and so may give a
    whole group to one engine."""
    sglang_server_concurrency: int = 512
    """Most requests in flight per engine."""
    engine_start_timeout_s: float = 600.0
    """Seconds from process start to the first answer of an engine."""
    engine_timeout_s: float = 600.0
    """Seconds for one generation request before it is re-issued."""
    rollout_external_engine_addrs: tuple[str, ...] = ()
    """`host:port` of engines that run already: none is started, slept or restarted, and weights go to them by process
    group or disk."""
    engine_token: bool = True
    """Start engines and router with a secret of the run, without which they refuse every call. External engines bring
    their own API key in the environment variable RLKIT_ENGINE_TOKEN. `--no-engine-token` lets anyone in who reaches
    their ports."""
    use_fault_tolerance: bool = False
    """Restart an engine that dies, load the current weights into it and route to it again, up to three times each;
    unset, a dead engine ends the run."""
    embedded_max_running_requests: int = 64
    """Sequences that the embedded engine decodes together; more wait in its queue."""
    sglang: dict[str, Any] = field(default_factory=dict[str, Any])
    """Pass-through: every `--sglang-NAME VALUE` of the pinned SGLang lands here as NAME -> VALUE."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncConfig:
    """How new weights reach the engines."""

    update_weight_transport: Literal["auto", "ipc", "nccl", "gloo", "disk"] = "auto"
    """`auto`: shared memory (`ipc`) when colocated, one process group (`nccl`; gloo on a CPU) when split. `gloo` goes
    through host memory: slower, for an external engine on the trainer's own GPU or hosts between which NCCL fails."""
    update_weight_buffer_size: int = 512 * 1024 * 1024
    """Bytes of one bucket."""
    update_weights_interval: int = 1
    """Steps between two updates of the engines; they also get the last weights. Above 1, samples come from older
    weights."""
    pause_generation_mode: Literal["abort", "retract"] = "abort"
    """What an update does to requests that are running. `abort` ends them with the tokens so far; `retract` holds them
    back and goes on with the new weights, so that one response may span versions."""
    update_weight_disk_dir: str | None = None
    """Folder for the `disk` transport, visible to trainer and engines; unset means the run folder."""
    check_weight_update_equal: bool = False
    """After every update prove that all engine weights are the trainer's: by checksum of every tensor for the embedded
    engine, by a second load from disk for SGLang. Slow."""
    check_weight_update_interval: int | None = None
    """The same proof at the first update (start, resume, a restarted engine) and then at every so many; unset makes
    none."""
