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
    """Where this rank stands. Axis `dp`: ranks that hold different samples; axis `cp`: ranks that hold different tokens
    of the same samples. Parameters are sharded over all of them (the flattened axis `dp_cp`).

    Under Megatron there are two more: `tp`, innermost, of ranks that hold parts of the same matrices, and `pp`,
    outermost, of ranks that hold other layers. That is the order of Megatron's own groups.
    """

    mesh: DeviceMesh
    shards: DeviceMesh
    """One axis along which FSDP shards parameters: all ranks, or with copies the ranks of this rank's copy."""
    layout: DeviceMesh
    """Where FSDP reduces gradients: `shards`, or with copies the two axes (`copies`, `shards`)."""
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
    def context_size(self) -> int:
        """Ranks that share the tokens of a row."""
        return self.mesh["cp"].size()

    @property
    def context_rank(self) -> int:
        return self.mesh["cp"].get_local_rank()

    @property
    def context_group(self) -> ProcessGroup:
        return self.mesh["cp"].get_group()

    @property
    def shard_size(self) -> int:
        """Ranks that hold different rows of the parameters."""
        return self.shards.size()

    @property
    def world_size(self) -> int:
        return self.mesh.size()

    @property
    def copy_index(self) -> int:
        """Which copy of the parameters this rank's shard belongs to."""
        return self.rank // self.shard_size

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def init_process_group(rank: RankInfo, *, timeout_s: float, num_copies: int = 1) -> RankMesh:
    """Join the default group and make the mesh. Collective over all training ranks.

    With `num_copies` n parameters are sharded over groups of world / n neighbouring ranks, each of which holds them
    all.

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
    cp, tp, pp = rank.context_parallel_size, rank.tensor_parallel_size, rank.pipeline_parallel_size
    assert rank.world_size % (cp * tp * pp) == 0
    dp = rank.world_size // (cp * tp * pp)
    if tp * pp == 1:
        mesh = init_device_mesh(rank.device, (dp, cp), mesh_dim_names=("dp", "cp"))
    else:
        mesh = init_device_mesh(rank.device, (pp, dp, cp, tp), mesh_dim_names=("pp", "dp", "cp", "tp"))
    if num_copies == 1:
        shards = layout = mesh._flatten("_".join(mesh.mesh_dim_names or ()))
    else:
        assert rank.world_size % num_copies == 0
        sizes = (num_copies, rank.world_size // num_copies)
        layout = init_device_mesh(rank.device, sizes, mesh_dim_names=("copies", "shards"))
        shards = layout["shards"]
    return RankMesh(mesh=mesh, shards=shards, layout=layout, rank=rank.rank, device=device)


def _store(rank: RankInfo, timeout: timedelta) -> dist.Store:  # pyright: ignore[reportPrivateImportUsage]
    if rank.world_size == 1:
        return dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        rank.master_addr, rank.master_port, rank.world_size, is_master=rank.is_main, timeout=timeout
    )


def cpu_mesh(layout: DeviceMesh) -> DeviceMesh:
    """The same layout of the ranks for tensors on the CPU. Collective."""
    if layout.device_type == "cpu":
        return layout
    return init_device_mesh("cpu", tuple(layout.shape), mesh_dim_names=layout.mesh_dim_names)


def new_cpu_group(*, timeout_s: float) -> ProcessGroup:
    """A gloo group of all ranks for a thread that works beside the others. Collective."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    assert isinstance(group, ProcessGroup)
    return group


def destroy_process_group() -> None:
    """Leave the default group, if this process is in one."""
    if dist.is_initialized():
        dist.destroy_process_group()
