"""Fingerprints of what a checkpoint holds, of the live tensors and of the files. Called by `backend.py` and by
`rlkit ckpt verify --deep`; what a fingerprint is stands in `types/fingerprints.py`.

Not collective: a rank reads its own shards only. The work is integer arithmetic on the tensors' device.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from rlkit.backends.fsdp.model import ScoringModel, first_local_row, saved_tensors
from rlkit.backends.fsdp.optimizer import ShardOptimizer
from rlkit.backends.fsdp.stored import stored_tensors
from rlkit.backends.mixing import INTEGER, mix_
from rlkit.dist.groups import RankMesh
from rlkit.types.fingerprints import WEIGHTS, WORD, merged

CHUNK = {"cpu": 1 << 15, "cuda": 1 << 24}
"""Elements mixed at once, by device; each takes two int64 of memory meanwhile. On a CPU they stay in the cache."""


def live_sums(
    model: ScoringModel, optimizer: ShardOptimizer, mesh: RankMesh, *, with_optimizer: bool = True
) -> dict[str, int]:
    """This rank's sums of weights and moments, under the names of the checkpoint. What all ranks hold alike is counted
    on rank 0.
    """
    state: dict[str, Tensor] = {f"{WEIGHTS}{name}": tensor for name, tensor in saved_tensors(model)}
    if with_optimizer:
        state |= optimizer.sharded_state()
    return state_sums(state, mesh)


def state_sums(state: Mapping[str, Tensor], mesh: RankMesh) -> dict[str, int]:
    """This rank's sums of tensors by name, as above."""
    return sums(dict(_own_parts(state, mesh)))


def file_fingerprints(directory: Path) -> dict[str, str]:
    """Fingerprints of every tensor in the files of a trainer's checkpoint, read one by one. Needs no process group."""
    found: dict[str, int] = {}
    for name, tensor in stored_tensors(directory):
        found |= sums({name: (tensor, 0)})
    return merged([found])


def _own_parts(state: Mapping[str, Tensor], mesh: RankMesh) -> Iterator[tuple[str, tuple[Tensor, int]]]:
    """(name, (local tensor, index of its first element in the whole one))."""
    for name, tensor in state.items():
        if not isinstance(tensor, DTensor):
            if mesh.is_main:
                yield name, (tensor.detach(), 0)
            continue
        assert tensor.placements[-1] == Shard(0), f"{name} is laid out as {tensor.placements}"
        if mesh.copy_index > 0:
            continue  # the first copy speaks for all
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
    bits = tensor.contiguous().flatten().view(INTEGER[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    size = CHUNK[tensor.device.type]
    for begin in range(0, bits.numel(), size):
        chunk = bits[begin : begin + size]
        mixed = torch.arange(start + begin, start + begin + chunk.numel(), dtype=torch.int64, device=tensor.device)
        total += mix_(mixed, chunk).sum()
    return total
