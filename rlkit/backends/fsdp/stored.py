"""The files of a trainer's checkpoint, read without a process group, a GPU or a model. Called by `checkpoint.py`,
`rlkit ckpt verify --deep` and `tools/convert_fsdp_to_hf.py`.

<directory>/dcp/           torch's distributed format: one file or more a rank
           /full_state.pt  with --fsdp-full-params, instead: {"model": {name: tensor}, "exp_avg": {...}, ...}

Either way a tensor is called `model.<name>`, `exp_avg.<name>`, `exp_avg_sq.<name>` or `step.<name>`.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from rlkit.backends.sharded_files import ShardedFiles
from rlkit.types.errors import CheckpointError

SHARDS = "dcp"
FULL = "full_state.pt"


def is_full(directory: Path) -> bool:
    """Whether the checkpoint is one file of whole tensors."""
    if not (directory / FULL).is_file() and not (directory / SHARDS).is_dir():
        raise CheckpointError(f"{directory} holds no trainer state: neither {SHARDS}/ nor {FULL} is there")
    return (directory / FULL).is_file()


def nested(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """`model.<name>` -> ["model"][<name>]."""
    tree: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition(".")
        tree.setdefault(kind, {})[rest] = tensor
    return tree


def full_state(directory: Path) -> dict[str, Tensor]:
    """The tensors of `full_state.pt` by name, memory-mapped: only what is looked at is read."""
    tree = torch.load(directory / FULL, map_location="cpu", mmap=True, weights_only=True)
    return {f"{kind}.{name}": tensor for kind, tensors in tree.items() for name, tensor in tensors.items()}


def stored_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor in the checkpoint."""
    if is_full(directory):
        return {name: tuple(tensor.shape) for name, tensor in full_state(directory).items()}
    return {name: tuple(stored.size) for name, stored in _metadata(directory)}


def stored_tensors(directory: Path, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor on the CPU) of those whose names begin with `prefix`, one at a time."""
    if is_full(directory):
        yield from ((name, value) for name, value in full_state(directory).items() if name.startswith(prefix))
        return
    for name, stored in _metadata(directory):
        if name.startswith(prefix):
            tensor = torch.empty(stored.size, dtype=stored.properties.dtype)
            load({name: tensor}, storage_reader=ShardedFiles(directory / SHARDS), no_dist=True)
            yield name, tensor


def stored_tensor(directory: Path, name: str) -> Tensor:
    """One whole tensor on the CPU; CheckpointError where there is none of that name."""
    for found, tensor in stored_tensors(directory, name):
        if found == name:
            return tensor
    raise CheckpointError(f"{directory} holds no tensor {name}")


def _metadata(directory: Path) -> Iterator[tuple[str, TensorStorageMetadata]]:
    everything: Mapping[str, Any] = ShardedFiles(directory / SHARDS).read_metadata().state_dict_metadata
    for name, stored in everything.items():
        if isinstance(stored, TensorStorageMetadata):
            yield name, stored
