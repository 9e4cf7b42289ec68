"""Every collective of the training ranks. Each names its group and says who must call it.

Rule: a collective never stands under a condition that ranks may answer differently. Compute everywhere, act in one
place.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from rlkit.dist.groups import RankMesh


def sum_over_data(x: Tensor, mesh: RankMesh) -> Tensor:
    """Sum of `x` over the data ranks, in place. Collective: call on every rank, also when this rank's share is
    empty.
    """
    if mesh.data_size > 1:
        dist.all_reduce(x, op=dist.ReduceOp.SUM, group=mesh.data_group)
    return x


def max_over_data(x: Tensor, mesh: RankMesh) -> Tensor:
    """Elementwise maximum of `x` over the data ranks, in place. Collective: call on every rank."""
    if mesh.data_size > 1:
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=mesh.data_group)
    return x


def max_over_ranks(x: Tensor, mesh: RankMesh) -> Tensor:
    """Elementwise maximum of `x` over all ranks, in place. Collective: call on every rank."""
    if mesh.world_size > 1:
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
    return x


def sum_over_shards(x: Tensor, mesh: RankMesh) -> Tensor:
    """Sum of `x` over the ranks that hold other rows of the parameters, in place. Collective: call on every rank."""
    if mesh.shard_size > 1:
        dist.all_reduce(x, op=dist.ReduceOp.SUM, group=mesh.shards.get_group())
    return x


def gather_over_shards(shard: Tensor, mesh: RankMesh) -> Tensor:
    """[n] on every rank -> [shards, n] on every rank. Collective: call on every rank with the same n and dtype."""
    if mesh.shard_size == 1:
        return shard[None]
    gathered = shard.new_empty(mesh.shard_size * shard.numel())
    # torch 2.13 gave the function a new name and warns about the old one, which is all that 2.11 has
    gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
    gather(gathered, shard.contiguous(), group=mesh.shards.get_group())
    return gathered.view(mesh.shard_size, -1)


def gather_rows(local: Tensor, num_rows: int, mesh: RankMesh) -> Tensor:
    """This rank's rows [n, ...] of a parameter as FSDP2 deals them -> the whole [num_rows, ...] on the device of the
    mesh. Collective: call on every rank.
    """
    local = local.to(mesh.device)
    padded = local.new_zeros((-(-num_rows // mesh.shard_size), *local.shape[1:]))
    padded[: local.shape[0]] = local
    return gather_over_shards(padded.view(-1), mesh).view(-1, *local.shape[1:])[:num_rows]


def all_gather_objects(value: Any) -> list[Any]:
    """`value` of every training rank, by rank. Collective over all training ranks; pickles, so keep it small."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)  # the default group has gloo beside NCCL, so pickles stay off the GPU
    return gathered


def barrier(group: ProcessGroup | None = None) -> None:
    """Wait until every training rank is here. Collective over all training ranks; nothing to do for a single one.
    `group`: a group of all ranks that no other thread uses.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(torch.zeros(1), group=group)  # a CPU tensor: waits for the processes, not for their GPU streams
