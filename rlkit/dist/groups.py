"""The default process group and the device mesh of the training ranks. Called by `backends/`; collectives are in
`collectives.py`.

gloo on a CPU, NCCL on CUDA (with gloo beside it for objects and CPU tensors). A single rank opens no socket.
"""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rlkit.types.errors import TrainError
from rlkit.types.ranks import RankInfo


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMesh:
    """Where this rank stands. Axis `dp`: the ranks that share out data and shard parameters."""

    mesh: DeviceMesh
    rank: int
    device: torch.device

    @property
    def data_size(self) -> int:
        """Ranks that hold different samples."""
        return self.mesh["dp"].size()

    @property
    def data_group(self) -> ProcessGroup:
        return self.mesh["dp"].get_group()

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def init_process_group(rank: RankInfo, *, timeout_s: float) -> RankMesh:
    """Join the default group and make the mesh. Collective over all training ranks.

    `timeout_s` bounds the rendezvous and every later collective. A group of this process that already has the same rank
    and size is used again, so a tool may build several backends one after the other.
    """
    device = torch.device("cuda", rank.local_rank) if rank.device == "cuda" else torch.device("cpu")
    if rank.device == "cuda":
        torch.cuda.set_device(device)
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (rank.rank, rank.world_size):
            raise TrainError(
                f"this process is already rank {dist.get_rank()} of {dist.get_world_size()}, "
                f"so it cannot become rank {rank.rank} of {rank.world_size}; start another process"
            )
    else:
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if rank.device == "cuda" else "gloo",
            store=_store(rank, timeout),
            rank=rank.rank,
            world_size=rank.world_size,
            timeout=timeout,
        )
    mesh = init_device_mesh(rank.device, (rank.world_size,), mesh_dim_names=("dp",))
    return RankMesh(mesh=mesh, rank=rank.rank, device=device)


def _store(rank: RankInfo, timeout: timedelta) -> dist.Store:  # pyright: ignore[reportPrivateImportUsage]
    if rank.world_size == 1:
        return dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        rank.master_addr, rank.master_port, rank.world_size, is_master=rank.is_main, timeout=timeout
    )


def destroy_process_group() -> None:
    """Leave the default group, if this process is in one."""
    if dist.is_initialized():
        dist.destroy_process_group()
