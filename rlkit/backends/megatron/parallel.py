"""Which ranks hold what: Megatron's process groups, and which layers each pipeline stage has. Called by `backend.py`.

Ranks are numbered as Megatron does, tensor parallelism innermost and pipeline stages outermost, which is the order of
`RankMesh` as well.
"""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch.distributed import ProcessGroup

from rlkit.backends.megatron.cpu import run_megatron_on_cpu
from rlkit.config.schema import RunConfig
from rlkit.dist.groups import RankMesh, init_process_group
from rlkit.types.errors import TrainError
from rlkit.types.ranks import RankInfo


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """One way in which ranks share the work."""

    group: ProcessGroup
    rank: int
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """Where this rank stands on every axis."""

    mesh: RankMesh
    tensor: Axis
    pipeline: Axis
    data: Axis
    """Ranks with other samples or, under context parallelism, other tokens: gradients are summed over them."""
    expert: Axis
    expert_tensor: Axis
    expert_data: Axis
    """Ranks that hold the same experts."""

    @property
    def device(self) -> torch.device:
        return self.mesh.device

    @property
    def is_first_stage(self) -> bool:
        return self.pipeline.rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline.rank == self.pipeline.size - 1


def join(cfg: RunConfig, rank: RankInfo, *, timeout_s: float) -> Ranks:
    """Join the default group and make Megatron's groups. Collective over all training ranks.

    A process that already has groups of the same sizes uses them again.
    """
    mesh = init_process_group(rank, timeout_s=timeout_s)
    if mesh.device.type == "cpu":
        run_megatron_on_cpu()
    sizes = cfg.megatron
    if parallel_state.model_parallel_is_initialized():
        _check_same_groups(cfg)
    else:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=sizes.tensor_model_parallel_size,
            pipeline_model_parallel_size=sizes.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=sizes.virtual_pipeline_size,
            context_parallel_size=cfg.train.context_parallel_size,
            expert_model_parallel_size=sizes.expert_model_parallel_size,
            expert_tensor_parallel_size=sizes.expert_tensor_parallel_size,
            create_gloo_process_groups=False,
            distributed_timeout_minutes=cfg.train.distributed_timeout_minutes,
        )
    if mesh.device.type == "cuda":
        model_parallel_cuda_manual_seed(cfg.train.seed)
    return Ranks(
        mesh=mesh,
        tensor=_axis(parallel_state.get_tensor_model_parallel_group()),
        pipeline=_axis(parallel_state.get_pipeline_model_parallel_group()),
        data=_axis(parallel_state.get_data_parallel_group(with_context_parallel=True)),
        expert=_axis(parallel_state.get_expert_model_parallel_group()),
        expert_tensor=_axis(parallel_state.get_expert_tensor_parallel_group()),
        expert_data=_axis(parallel_state.get_expert_data_parallel_group()),
    )


def _axis(group: Any) -> Axis:
    assert isinstance(group, ProcessGroup)
    return Axis(group=group, rank=group.rank(), size=group.size())


def _check_same_groups(cfg: RunConfig) -> None:
    wanted = (cfg.megatron.tensor_model_parallel_size, cfg.megatron.pipeline_model_parallel_size)
    found = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    )
    if wanted != found:
        raise TrainError(
            f"this process already has Megatron groups of tensor x pipeline = {found}, not {wanted}; "
            "start another process"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A run of layers on one pipeline stage; a stage has several under virtual pipelining."""

    stage: int
    index: int
    """Among the chunks of its stage."""
    layers: range
    """0-based layers of the whole model."""
    is_first: bool
    """Holds the embedding."""
    is_last: bool
    """Holds the last norm and the head."""


def deal_layers(
    num_layers: int, *, stages: int, chunks_per_stage: int = 1, first: int | None = None, last: int | None = None
) -> list[Chunk]:
    """All chunks, in the order in which a token passes them. `first` and `last`: layers of the first and of the last
    stage where they differ from the others'.
    """
    sizes = stage_sizes(num_layers, stages=stages, first=first, last=last)
    per_chunk = [size // chunks_per_stage for size in sizes]
    chunks, start = [], 0
    for index in range(chunks_per_stage):
        for stage in range(stages):
            stop = start + per_chunk[stage]
            chunks.append(
                Chunk(
                    stage=stage,
                    index=index,
                    layers=range(start, stop),
                    is_first=index == 0 and stage == 0,
                    is_last=index == chunks_per_stage - 1 and stage == stages - 1,
                )
            )
            start = stop
    assert start == num_layers, "a rule refuses it"
    return chunks


def stage_sizes(num_layers: int, *, stages: int, first: int | None, last: int | None) -> list[int]:
    """Layers of each stage."""
    given = [size for size in (first, last) if size is not None]
    rest = stages - len(given)
    middle = (num_layers - sum(given)) // rest if rest else 0
    sizes = [middle] * stages
    if first is not None:
        sizes[0] = first
    if last is not None:
        sizes[-1] = last
    return sizes
