"""What each phase of a step takes on a GPU and on a host, part by part, before anything has run. No torch: the dry run
uses it. `memory_plan.py` estimates a training step; here engines, sleepers, buckets and processes join it.

What is counted is exact (parameters, moments, buckets); what a process brings along (contexts, libraries) is taken from
measured runs and named as a constant. docs/performance.md compares with measured peaks.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from rlkit.algo.memory_plan import (
    ADAM_BYTES,
    FIXED_BYTES,
    GIB,
    GRADIENT_BYTES,
    MARGIN,
    MASTER_BYTES,
    ModelShape,
    TrainerMemory,
    auto_chunk_size,
    plan_checkpointing,
    trainer_memory,
)
from rlkit.config.schema import RunConfig

Phase = Literal["train", "log-prob", "generate", "sync", "save"]
PHASES: tuple[Phase, ...] = ("generate", "log-prob", "train", "save", "sync")

ASLEEP_BYTES = 4 * GIB
"""What a sleeping engine leaves on the GPU that it shares."""
FREE_SHARE = 0.95
"""Of the GPU's memory; the rest is lost between the allocator's blocks."""
ENGINE_BYTES = 3 * GIB
"""Of an awake engine beside its static share: context, captured graphs, activations of a prefill of 8,192 tokens."""
SLEEPING_TRAINER_BYTES = GIB
"""Its CUDA context."""

CUDA_RANK_HOST_BYTES, CPU_RANK_HOST_BYTES = 3 * GIB, int(0.3 * GIB)
"""A training rank's libraries: torch, transformers, and with CUDA its driver's share."""
SGLANG_HOST_BYTES, EMBEDDED_HOST_BYTES = 6 * GIB, int(0.3 * GIB)
"""An engine's processes."""
DRIVER_BYTES = int(1.5 * GIB)
"""Driver, rollout manager, router and Ray's own processes."""
GRADER_BYTES = int(0.15 * GIB)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """What a run is planned for."""

    device: Literal["cuda", "cpu"]
    gpu_bytes: int | None
    """Of one GPU; None where it is not known, and on a CPU."""
    host_bytes: int | None
    """Of one node."""
    static_share: float | None
    """Of a GPU that the engine takes for weights and KV cache; None where SGLang decides by itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """The most that one place holds in one phase."""

    phase: Phase
    parts: Mapping[str, int]
    """What it is -> bytes."""

    @property
    def num_bytes(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Peaks by place. A place is one GPU, or one host."""

    places: Mapping[str, tuple[Peak, ...]]
    num_checkpointed: int
    """Blocks that recompute their activations."""
    kv_bytes_per_token: int
    """On one GPU of an engine."""
    trainer_bytes: int
    """What a rank's own allocator holds at the peak of a training step: without contexts and sleeping engines."""

    def worst(self, place: str) -> Peak:
        return max(self.places[place], key=lambda peak: peak.num_bytes)


def plan_memory(
    cfg: RunConfig,
    shape: ModelShape,
    hardware: Hardware,
    *,
    frozen_params: int = 0,
    num_tokens: int | None = None,
) -> MemoryPlan:
    """Peaks of every phase. `frozen_params`: of reference and teacher together. `num_tokens`: of the longest pack on
    one rank, where it is known better than from the flags.
    """
    planner = _Planner(cfg, shape, hardware, frozen_params, num_tokens or longest_pack(cfg))
    places: dict[str, tuple[Peak, ...]] = {}
    if hardware.device == "cuda":
        places |= planner.gpus()
    places["host"] = planner.hosts()
    return MemoryPlan(
        places=places,
        num_checkpointed=planner.num_checkpointed,
        kv_bytes_per_token=planner.kv_bytes_per_token,
        trainer_bytes=planner.trainer.peak(planner.num_checkpointed) - FIXED_BYTES,
    )


def longest_pack(cfg: RunConfig) -> int:
    """Most tokens of a micro-batch on one rank: a sample longer than `--max-tokens-per-gpu` runs alone."""
    return max(cfg.train.max_tokens_per_gpu, -(-longest_sample(cfg) // cfg.train.context_parallel_size))


def longest_sample(cfg: RunConfig) -> int:
    """Most tokens of prompt and response, as far as the flags tell."""
    if cfg.rollout.rollout_max_context_len is not None:
        return cfg.rollout.rollout_max_context_len
    return (cfg.data.rollout_max_prompt_len or 0) + cfg.rollout.rollout_max_response_len


def compute_bytes(cfg: RunConfig, device: Literal["cuda", "cpu"]) -> int:
    """Of a weight in engines, scoring models and products."""
    if cfg.precision.fp16 or cfg.model.dtype == "bfloat16":
        return 2
    if cfg.model.dtype == "auto":
        return 2 if device == "cuda" else 4
    return 4


class _Planner:
    """The sums of one configuration."""

    def __init__(
        self, cfg: RunConfig, shape: ModelShape, hardware: Hardware, frozen_params: int, num_tokens: int
    ) -> None:
        self._cfg = cfg
        self._shape = shape
        self._hardware = hardware
        self._is_cuda = hardware.device == "cuda"
        self._ranks = cfg.cluster.actor_num_gpus // cfg.fsdp.fsdp_replicate_size
        self._compute = compute_bytes(cfg, hardware.device)
        self._frozen = self._compute * frozen_params // self._ranks
        states = (MASTER_BYTES + ADAM_BYTES) * shape.num_params // self._ranks
        self._critic = {"critic": states} if cfg.needs_critic else {}  # taken to be as large as the policy
        self._shares_gpu = cfg.cluster.colocate and cfg.starts_engine_processes
        self._num_tokens = num_tokens
        self.trainer = self._trainer()
        self.num_checkpointed = self._checkpointed()
        engine_gpus = cfg.cluster.rollout_num_gpus_per_engine
        self._engine_weights = self._compute * shape.num_params // engine_gpus
        self.kv_bytes_per_token = 2 * self._compute * shape.num_layers * max(1, shape.keys // engine_gpus)

    # ---- the trainer ---------------------------------------------------------------------------------------------

    def _trainer(self) -> TrainerMemory:
        cfg, shape = self._cfg, self._shape
        alone = self._ranks == 1
        compiled = cfg.train.torch_compile == "on" or (cfg.train.torch_compile == "auto" and self._is_cuda)
        memory = trainer_memory(
            shape,
            num_ranks=self._ranks,
            num_tokens=self._num_tokens,
            chunk_size=cfg.train.log_probs_chunk_size or auto_chunk_size(shape.vocab, is_cuda=self._is_cuda),
            is_compiled=compiled,
            keeps_weights=alone,
            compute_bytes=self._compute,
        )
        if not self._is_cuda:  # attention works on dense copies of queries, repeated keys and values, and its output
            copies = 4 * shape.queries * self._compute * self._num_tokens
            memory = replace(memory, block=memory.block + copies)
        if cfg.lora.lora_rank > 0:  # the base is frozen: neither moments nor gradients
            adapters = adapter_params(cfg.lora.lora_rank, shape)
            states = MASTER_BYTES * shape.num_params + (MASTER_BYTES + ADAM_BYTES) * adapters
            memory = replace(memory, states=math.ceil(states / self._ranks), gradients=2 * GRADIENT_BYTES * adapters)
        return memory

    def _checkpointed(self) -> int:
        forced = self._cfg.train.gradient_checkpointing
        if forced is not None:
            return self._shape.num_layers * forced
        if self._hardware.gpu_bytes is None:
            return 0
        room = int(FREE_SHARE * self._hardware.gpu_bytes) - (ASLEEP_BYTES if self._shares_gpu else 0)
        return plan_checkpointing(self.trainer, room, self._num_tokens).num_blocks

    def _states(self) -> dict[str, int]:
        """What lies on a rank's device between steps."""
        on_host = self._is_cuda and self._cfg.fsdp.fsdp_cpu_offload
        return {"weights and moments": 0 if on_host else self.trainer.states}

    def _training(self) -> dict[str, int]:
        memory, cut = self.trainer, self.num_checkpointed
        kept = (memory.num_layers - cut) * memory.block + cut * memory.block_input
        return (
            self._states()
            | {
                "gradients": memory.gradients,
                "whole weights": memory.weights,
                "logits": memory.logits,
                "activations": int(MARGIN * (kept + memory.block)),
            }
            | self._critic
        )  # it comes to the GPU for its own optimizer steps, beside the policy's states

    def _scoring(self) -> dict[str, int]:
        memory = self.trainer
        return self._states() | {
            "whole weights": memory.weights,
            "scoring models": self._frozen,
            "logits": memory.logits // 2,
            "activations": 2 * memory.block_input + memory.block,
        }

    def _buckets(self, *, from_host: bool) -> int:
        """Two buckets, and room for one in the dtype of the masters where they come from the host."""
        whole, bucket = self._compute * self._shape.num_params, self._bucket()
        num = 2 if whole > bucket else 1
        return num * bucket + (bucket * MASTER_BYTES // self._compute if from_host else 0)

    def _bucket(self) -> int:
        """A tensor is never cut, so the embedding may be a bucket of its own."""
        embedding = self._compute * self._shape.vocab * self._shape.hidden
        whole = self._compute * self._shape.num_params
        return min(max(self._cfg.sync.update_weight_buffer_size, embedding), whole)

    # ---- places --------------------------------------------------------------------------------------------------

    def gpus(self) -> dict[str, tuple[Peak, ...]]:
        cfg = self._cfg
        if not cfg.starts_trainer:
            return {"GPU of an engine": (self._generating({}),)} if cfg.starts_engine_processes else {}
        beside = {"contexts": FIXED_BYTES}
        if self._shares_gpu:
            beside["engine asleep"] = ASLEEP_BYTES
        peaks = [
            Peak(phase="log-prob", parts=self._scoring() | beside),
            Peak(phase="train", parts=self._training() | beside),
            Peak(phase="save", parts=self._states() | self._critic | beside),
        ]
        if self._shares_gpu:
            update = {"engine weights": self._engine_weights, "buckets": self._buckets(from_host=True)} | beside
            peaks += [self._generating({"trainer asleep": SLEEPING_TRAINER_BYTES}), Peak(phase="sync", parts=update)]
            return {"GPU of trainer and engine": tuple(_ordered(peaks))}
        places: dict[str, tuple[Peak, ...]] = {}
        if cfg.starts_engines:
            update = self._states() | {"buckets": self._buckets(from_host=False)} | beside
            peaks.append(Peak(phase="sync", parts=update))
        places["GPU of the trainer"] = tuple(_ordered(peaks))
        if cfg.starts_engine_processes:
            generating = self._generating({})
            update = Peak(phase="sync", parts=dict(generating.parts) | {"bucket": self._bucket()})
            places["GPU of an engine"] = (generating, update)
        return places

    def _generating(self, beside: Mapping[str, int]) -> Peak:
        share, gpu = self._hardware.static_share, self._hardware.gpu_bytes
        if share is not None and gpu is not None:
            cache = max(0, int(share * gpu) - self._engine_weights)
        else:  # not known how much it takes: as much as the samples in flight need
            in_flight = min(self._cfg.samples_per_rollout, self._cfg.engine.sglang_server_concurrency)
            share_of_engine = -(-in_flight // max(1, self._cfg.cluster.num_engines))
            cache = share_of_engine * longest_sample(self._cfg) * self.kv_bytes_per_token
            if gpu is not None:
                cache = min(cache, max(0, int(0.88 * gpu) - self._engine_weights))
        parts = {"engine weights": self._engine_weights, "KV cache": cache, "engine's own": ENGINE_BYTES}
        return Peak(phase="generate", parts=parts | dict(beside))

    def hosts(self) -> tuple[Peak, ...]:
        """One node: the fullest, which holds the driver."""
        base = {"driver, manager, router": DRIVER_BYTES, "graders": GRADER_BYTES * self._cfg.reward.rm_num_workers}
        return tuple(
            _ordered(
                [Peak(phase=phase, parts=base | self._rank_host(phase) | self._engine_host(phase)) for phase in PHASES]
            )
        )

    def _rank_host(self, phase: Phase) -> dict[str, int]:
        cfg = self._cfg
        if not cfg.starts_trainer:
            return {}
        ranks = min(cfg.cluster.actor_num_gpus, cfg.cluster.actor_num_gpus_per_node)
        state = self.trainer.states
        parts = {"training ranks": ranks * (CUDA_RANK_HOST_BYTES if self._is_cuda else CPU_RANK_HOST_BYTES)}
        copies = int(cfg.checkpoint.async_save)
        if self._is_cuda:
            # one pinned buffer serves sleeping and saving, and once filled it stays
            copies += int(self._shares_gpu or phase == "save") + int(cfg.fsdp.fsdp_cpu_offload)
            parts["pinned copies"] = ranks * (copies * state + self._frozen + sum(self._critic.values()))
            return parts
        parts |= {name: ranks * size for name, size in (self._on_cpu(phase) | self._critic).items()}
        if copies:
            parts["copy of a checkpoint"] = ranks * state
        return parts

    def _on_cpu(self, phase: Phase) -> dict[str, int]:
        """What a rank holds in host memory where there is no GPU. A sleeping one keeps it."""
        match phase:
            case "train":
                return self._training() | {"scoring models": self._frozen}
            case "log-prob":
                return self._scoring()
            case "sync":
                copies = {"buckets": self._bucket(), "bucket in shared memory": self._bucket()}
                return self._states() | {"scoring models": self._frozen} | copies
            case _:
                return self._states() | {"scoring models": self._frozen}

    def _engine_host(self, phase: Phase) -> dict[str, int]:
        cfg = self._cfg
        if not cfg.starts_engine_processes:
            return {}
        on_node = min(
            cfg.cluster.num_engines, max(1, cfg.cluster.slots_per_node // cfg.cluster.rollout_num_gpus_per_engine)
        )
        is_sglang = cfg.engine.rollout_engine == "sglang" or (cfg.engine.rollout_engine == "auto" and self._is_cuda)
        parts = {"engines": on_node * (SGLANG_HOST_BYTES if is_sglang else EMBEDDED_HOST_BYTES)}
        if not self._is_cuda:
            parts["engine weights"] = on_node * self._engine_weights
            if phase == "generate" or not cfg.cluster.colocate:
                running = min(cfg.engine.embedded_max_running_requests, cfg.samples_per_rollout)
                parts["KV cache"] = on_node * running * longest_sample(cfg) * self.kv_bytes_per_token
        return parts


def adapter_params(rank: int, shape: ModelShape) -> int:
    """Parameters of LoRA on every linear layer of the blocks."""
    into_queries = shape.hidden + shape.queries
    into_keys = shape.hidden + shape.keys
    wide = shape.hidden + shape.intermediate
    return rank * shape.num_layers * (2 * into_queries + 2 * into_keys + 3 * wide)


def _ordered(peaks: list[Peak]) -> list[Peak]:
    return sorted(peaks, key=lambda peak: PHASES.index(peak.phase))
