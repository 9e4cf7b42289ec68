"""Fingerprints of what a checkpoint holds, of the live tensors and of the files. Called by `backend.py` and by
`rlkit ckpt verify --deep`; what a fingerprint is stands in `types/fingerprints.py`.

Not collective: a rank reads its own shards only. The work is integer arithmetic on the tensors' device.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor, Shard

from rlkit.backends.fsdp.model import ScoringModel, first_local_row, named_persistent_buffers, named_shards
from rlkit.backends.fsdp.optimizer import ShardOptimizer
from rlkit.dist.groups import RankMesh
from rlkit.types.fingerprints import WEIGHTS, WORD, merged

CHUNK = {"cpu": 1 << 15, "cuda": 1 << 24}
"""Elements mixed at once, by device; each takes two int64 of memory meanwhile. On a CPU they stay in the cache."""
_INTEGER = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def live_sums(
    model: ScoringModel, optimizer: ShardOptimizer, mesh: RankMesh, *, with_optimizer: bool = True
) -> dict[str, int]:
    """This rank's sums of weights and moments, under the names of the checkpoint. What all ranks hold alike is counted
    on rank 0.
    """
    state: dict[str, Tensor] = {f"{WEIGHTS}{name}": shard for name, shard in named_shards(model)}
    state |= {f"{WEIGHTS}{name}": buffer for name, buffer in named_persistent_buffers(model)}
    if with_optimizer:
        state |= optimizer.sharded_state()
    return sums(dict(_own_parts(state, mesh)))


def file_fingerprints(directory: Path) -> dict[str, str]:
    """Fingerprints of every tensor in a checkpoint's files, read one by one. Needs no process group."""
    found: dict[str, int] = {}
    for name, stored in FileSystemReader(directory).read_metadata().state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            tensor = torch.empty(stored.size, dtype=stored.properties.dtype)
            load({name: tensor}, checkpoint_id=directory, no_dist=True)
            found |= sums({name: (tensor, 0)})
    return merged([found])


def _own_parts(state: Mapping[str, Tensor], mesh: RankMesh) -> Iterator[tuple[str, tuple[Tensor, int]]]:
    """(name, (local tensor, index of its first element in the whole one))."""
    for name, tensor in state.items():
        if not isinstance(tensor, DTensor):
            if mesh.is_main:
                yield name, (tensor.detach(), 0)
            continue
        assert tensor.placements == (Shard(0),), f"{name} is laid out as {tensor.placements}"
        row_size = tensor.numel() // max(1, tensor.shape[0])
        yield name, (tensor.to_local().detach(), first_local_row(tensor, mesh) * row_size)


def sums(parts: Mapping[str, tuple[Tensor, int]]) -> dict[str, int]:
    """Sum by name, of (tensor, index of its first element in the whole one). Waits for the device once."""
    if not parts:
        return {}
    device = next(iter(parts.values()))[0].device
    totals = torch.stack([_mixed_sum(tensor, start).to(device) for tensor, start in parts.values()])
    return {name: value % WORD for name, value in zip(parts, totals.tolist(), strict=True)}


def _mixed_sum(tensor: Tensor, start: int) -> Tensor:
    """int64 scalar on the tensor's device. Multiplications and the sum wrap around, so their order does not matter."""
    bits = tensor.contiguous().flatten().view(_INTEGER[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    size = CHUNK[tensor.device.type]
    for begin in range(0, bits.numel(), size):
        chunk = bits[begin : begin + size]
        mixed = torch.arange(start + begin, start + begin + chunk.numel(), dtype=torch.int64, device=tensor.device)
        mixed.mul_(0x1E3779B97F4A7C15).add_(chunk)
        mixed.bitwise_xor_(mixed >> 32).mul_(0x2545F4914F6CDD1D)
        mixed.bitwise_xor_(mixed >> 29).mul_(0x369DEA0F31A53F85)
        total += mixed.sum()
    return total
