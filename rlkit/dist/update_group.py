"""The process group over which a split trainer broadcasts weights to its engines: trainer rank 0 is rank 0, engine
ranks follow.

Trainer and engines belong to different worlds, so the group is built beside torch's default one. torch has no public
call for that; `_new_process_group_helper` is the one that SGLang uses for its half (same signature in torch 2.11 and
2.13). Used by `sync/` and by the embedded engine.
"""

from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.rendezvous import rendezvous as rendezvous_at


def join_update_group(
    *, backend: str, address: str, port: int, rank: int, world_size: int, name: str, timeout_s: float
) -> ProcessGroup:
    """Join the group `name`. Collective over its `world_size` members; rank 0 opens the store at `address:port`."""
    timeout = timedelta(seconds=timeout_s)
    rendezvous = rendezvous_at(f"tcp://{address}:{port}", rank, world_size, timeout=timeout)
    store, rank, world_size = next(iter(rendezvous))
    store.set_timeout(timeout)
    group, _ = distributed_c10d._new_process_group_helper(  # pyright: ignore[reportPrivateUsage]
        world_size,
        rank,
        [],
        dist.Backend(backend),
        distributed_c10d.PrefixStore(name, store),
        group_name=name,  # pyright: ignore[reportArgumentType]  (a NewType of str in 2.13)
        timeout=timeout,
    )
    assert isinstance(group, ProcessGroup)
    # pyright: ignore[reportPrivateUsage]
    distributed_c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


def broadcast(tensor: Tensor, *, group: ProcessGroup) -> None:
    """Send `tensor` from rank 0 to every member, in place. Collective over the group."""
    dist.broadcast(tensor, group=group, group_src=0)


def leave_update_group(group: ProcessGroup) -> None:
    """Destroy the group on this member."""
    dist.destroy_process_group(group)
