"""Where a process stands: `RankInfo` for a training rank, `EngineEndpoint` for an engine. Made by `orchestration/`,
read below it."""

from dataclasses import dataclass
from typing import Literal

MetricSet = dict[str, float]
"""Metric name (`train/loss`, `rollout/reward`, ...) -> value. Reduced over ranks already."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankInfo:
    """One training rank."""

    rank: int
    world_size: int
    local_rank: int
    """Index of the device on its node; plain CUDA index, nothing is hidden by CUDA_VISIBLE_DEVICES."""
    master_addr: str
    master_port: int
    device: Literal["cpu", "cuda"]
    num_threads: int
    """Intra-op threads of this process on a CPU."""
    context_parallel_size: int = 1
    """Neighbouring ranks that share the tokens of a sample."""
    tensor_parallel_size: int = 1
    """Neighbouring ranks that share each matrix of a layer (Megatron)."""
    pipeline_parallel_size: int = 1
    """Stages that share the layers of the model (Megatron); ranks of a stage stand next to each other."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineEndpoint:
    """One running engine as trainers and controllers reach it."""

    index: int
    url: str
    """`http://host:port` of the engine itself, not of the router."""
    num_gpus: int
    """Ranks of the engine (tensor parallel x pipeline parallel)."""
    colocated_ranks: tuple[int, ...]
    """Training ranks on the same devices, in engine-rank order; empty when split."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InitReport:
    """What a backend says after `init`, on every rank."""

    num_params: int
    """Parameters of the policy, tied ones counted once."""
    num_saved_params: int | None = None
    """Those of them that a checkpoint holds, where that is not all: adapters."""
    num_critic_params: int = 0
    """Those of PPO's critic."""
    resumed_step: int | None
    """Step stored in the checkpoint that was loaded; None for a fresh start."""
    memory_plan: str
    """How the blocks are run, and why: compiled or not, how many recompute their activations."""
    seconds: float
