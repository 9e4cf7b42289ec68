"""Saves and loads what a run needs to continue. Called by `backend.py`.

<directory>/dcp/             main parameters, moments and step counts in torch's distributed format
           /rng_rank<r>.pt   random state of each rank
           /trainer.json     step, optimizer steps, ranks; written last

Tensors are written under Hugging Face names, as the FSDP backend does: `model.<name>`, `exp_avg.<name>`,
`exp_avg_sq.<name>`, `step.<name>`, all float32. So a checkpoint fits any layout of tensor, pipeline, expert and data
parallelism, and either backend.
"""

import json
import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner import TensorWriteData as TensorData
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from rlkit.backends.megatron.loading import is_mine, model_entries, tensor_axis
from rlkit.backends.megatron.model import Model
from rlkit.backends.megatron.names import Entry, Piece
from rlkit.backends.megatron.optimizer import MainOptimizer, Segment
from rlkit.backends.megatron.parallel import Axis, Ranks
from rlkit.backends.sharded_files import ShardedFiles
from rlkit.dist.collectives import barrier
from rlkit.types.errors import CheckpointError

logger = logging.getLogger(__name__)

FORMAT = 1
META = "trainer.json"
STATE = "dcp"
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A rectangular part of a whole tensor."""

    tensor: Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    """Of the whole tensor."""

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(offsets=torch.Size(self.offsets), sizes=self.tensor.shape)


def block_of(piece: Piece, axis: Axis, part: Tensor) -> Block | None:
    """Where a rank's part of a Hugging Face tensor belongs; None where it lies in the padding of the vocabulary."""
    offsets = [0] * len(piece.shape)
    if piece.axis is not None and axis.size > 1:
        each = part.shape[piece.axis]
        offsets[piece.axis] = first = axis.rank * each
        count = min(each, piece.shape[piece.axis] - first)
        if count <= 0:
            return None
        part = part.narrow(piece.axis, 0, count)
    return Block(tensor=part, offsets=tuple(offsets), shape=piece.shape)


# ---- saving --------------------------------------------------------------------------------------------------------


def save_state(
    directory: Path, model: Model, optimizer: MainOptimizer, ranks: Ranks, *, step: int, optimizer_steps: int
) -> None:
    """Write everything, durably. Collective over all ranks; returns when all are done."""
    directory.mkdir(parents=True, exist_ok=True)
    blocks = _collect(model, optimizer, ranks)
    writer = FileSystemWriter(directory / STATE, sync_files=False, thread_count=_num_writers(ranks))
    save({}, storage_writer=writer, planner=_SaveBlocks(blocks))
    torch.save(_rng_state(ranks.device), _rng_path(directory, ranks.mesh.rank))
    _sync_files(directory / STATE)
    barrier()
    if ranks.mesh.is_main:
        meta = {"step": step, "optimizer_steps": optimizer_steps, "world_size": ranks.mesh.world_size, "format": FORMAT}
        (directory / META).write_text(json.dumps(meta, indent=2))
        _sync_files(directory)
    barrier()


def _collect(model: Model, optimizer: MainOptimizer, ranks: Ranks) -> dict[str, Block]:
    """What this rank writes, in host memory. Of the data ranks that share a parameter each writes every n-th."""
    blocks: dict[str, Block] = {}
    tensors = model.tensors()
    for number, entry in enumerate(model_entries(model, ranks)):
        if not is_mine(entry, model, ranks):
            continue
        key = (entry.chunk, entry.path)
        axis = tensor_axis(entry, ranks)
        values: dict[str, Tensor] = {}
        group = optimizer.groups.get(key)
        if group is None:  # a buffer
            values["model"] = tensors[key]
        else:
            shape = tuple(tensors[key].shape)
            values["model"] = optimizer.gather(key, lambda segment: segment.main.detach(), shape)
            for name in MOMENTS:
                values[name] = optimizer.gather(key, _moment_reader(optimizer, name), shape)
        is_writer = group is None or number % group.size() == group.rank()
        if entry.is_copy or not is_writer:
            continue
        for kind, whole in values.items():
            for piece, part in zip(entry.pieces, entry.unpack(whole), strict=True):
                block = block_of(piece, axis, part)
                if block is not None:
                    blocks[f"{kind}.{piece.name}"] = _on_host(block)
        if group is not None:
            for piece in entry.pieces:
                count = torch.tensor(float(optimizer.num_steps))
                blocks[f"step.{piece.name}"] = Block(tensor=count, offsets=(), shape=())
    return blocks


def _moment_reader(optimizer: MainOptimizer, name: str) -> Any:
    def read(segment: Segment) -> Tensor:
        return optimizer.moment(segment, name)

    return read


def _on_host(block: Block) -> Block:
    return Block(tensor=block.tensor.to("cpu").contiguous(), offsets=block.offsets, shape=block.shape)


class _SaveBlocks(DefaultSavePlanner):
    """Writes blocks instead of the entries of a state dict. What several ranks have is written once."""

    def __init__(self, blocks: dict[str, Block]) -> None:
        super().__init__(flatten_state_dict=False)
        self._blocks = blocks

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(name, block) for name, block in self._blocks.items()])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._blocks[write_item.index.fqn].tensor


def _write_item(name: str, block: Block) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(name, torch.Size(block.offsets)),
        type=WriteItemType.SHARD,
        tensor_data=TensorData(
            chunk=block.chunk,
            properties=TensorProperties.create_from_tensor(block.tensor),
            size=torch.Size(block.shape),
        ),
    )


# ---- loading -------------------------------------------------------------------------------------------------------


def load_state(
    directory: Path, model: Model, optimizer: MainOptimizer, ranks: Ranks, *, with_optimizer: bool
) -> dict[str, Any]:
    """Fill model and (with `with_optimizer`) optimizer and random state. Returns what `trainer.json` says. Collective.

    The layout may differ from the one that saved; only the random state is then left as it is, with a warning.
    """
    meta = _read_meta(directory)
    stored = ShardedFiles(directory / STATE).read_metadata().state_dict_metadata
    mine = [entry for entry in model_entries(model, ranks) if is_mine(entry, model, ranks)]
    kinds = ("model", *MOMENTS) if with_optimizer else ("model",)
    blocks: dict[str, Block] = {}
    for entry in mine:
        axis = tensor_axis(entry, ranks)
        is_buffer = (entry.chunk, entry.path) not in optimizer.groups
        for piece in entry.pieces:
            for kind in ("model",) if is_buffer else kinds:
                block = block_of(piece, axis, _empty_part(piece, axis))
                if block is not None:
                    blocks[f"{kind}.{piece.name}"] = block
    count = torch.zeros(())
    if with_optimizer:
        name = next(name for name in stored if name.startswith("step."))
        blocks[name] = Block(tensor=count, offsets=(), shape=())
    _check_shapes(directory, stored, blocks)
    load(
        {name: block.tensor for name, block in blocks.items()},
        storage_reader=ShardedFiles(directory / STATE),
        planner=_LoadBlocks(blocks),
    )
    if with_optimizer:
        optimizer.set_num_steps(int(count.item()))
    with torch.no_grad():
        for entry in mine:
            _fill(entry, blocks, model, optimizer, ranks, kinds)
    optimizer.params_from_main()
    if with_optimizer:
        _restore_rng(directory, meta, ranks)
    return meta


def _empty_part(piece: Piece, axis: Axis) -> Tensor:
    shape = list(piece.shape)
    if piece.axis is not None:
        shape[piece.axis] = -(-shape[piece.axis] // axis.size)
    return torch.zeros(shape)


def _fill(
    entry: Entry, blocks: dict[str, Block], model: Model, optimizer: MainOptimizer, ranks: Ranks, kinds: tuple[str, ...]
) -> None:
    key = (entry.chunk, entry.path)
    axis = tensor_axis(entry, ranks)
    segments = [segment for segment in optimizer.segments if segment.key == key]
    for kind in kinds if key in optimizer.groups else ("model",):
        parts = []
        for piece in entry.pieces:
            part = _empty_part(piece, axis)
            block = blocks.get(f"{kind}.{piece.name}")
            if block is not None:
                part[tuple(slice(size) for size in block.tensor.shape)] = block.tensor
            parts.append(part)
        packed = entry.pack(parts)
        if key not in optimizer.groups:
            model.tensors()[key].copy_(packed)
            continue
        for segment in segments:
            target = segment.main.detach() if kind == "model" else optimizer.moment(segment, kind)
            target.copy_(packed.reshape(-1)[segment.start : segment.stop])


class _LoadBlocks(DefaultLoadPlanner):
    """Reads blocks instead of the entries of a state dict."""

    def __init__(self, blocks: dict[str, Block]) -> None:
        super().__init__()
        self._blocks = blocks

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, block in self._blocks.items():
            stored = self.metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, stored, [block.chunk])
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        tensor = self._blocks[read_item.dest_index.fqn].tensor
        for dim, (start, size) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(dim, start, size)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """The tensor is ours already."""


def _check_shapes(directory: Path, stored: dict[str, Any], blocks: dict[str, Block]) -> None:
    for name, block in blocks.items():
        found = stored.get(name)
        size = tuple(found.size) if isinstance(found, TensorStorageMetadata) else None
        if size != block.shape:
            told = "no such tensor" if size is None else f"shape {size}"
            raise CheckpointError(
                f"{directory} does not fit this run: {name} has shape {block.shape} here, and the checkpoint has "
                f"{told}. Continue with the --hf-checkpoint that it was trained from"
            )


# ---- files ---------------------------------------------------------------------------------------------------------


def _read_meta(directory: Path) -> dict[str, Any]:
    path = directory / META
    if not path.is_file():
        raise CheckpointError(f"{directory} holds no complete trainer checkpoint: {META} is missing")
    meta = json.loads(path.read_text())
    if meta.get("format") != FORMAT:
        raise CheckpointError(f"{path} has format {meta.get('format')}, this version of rlkit reads {FORMAT}")
    if not (directory / STATE).is_dir():
        raise CheckpointError(
            f"{directory} has no {STATE}/: --train-backend megatron reads sharded checkpoints only, not those of "
            "--fsdp-full-params"
        )
    if meta.get("lora") is not None:
        raise CheckpointError(f"{directory} holds adapters only; --train-backend megatron trains whole models")
    return meta


def _num_writers(ranks: Ranks) -> int:
    """Threads, and so files, of each rank; the ranks of a node share its cores."""
    return max(1, min(8, (os.cpu_count() or 1) // min(ranks.mesh.world_size, 8)))


def _sync_files(directory: Path) -> None:
    """Make the files in `directory` survive a power loss."""
    with ThreadPoolExecutor(max_workers=8) as pool:
        list(pool.map(_sync, list(_files(directory))))


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in directory.iterdir() if path.is_file())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rng_path(directory: Path, rank: int) -> Path:
    return directory / f"rng_rank{rank}.pt"


def _rng_state(device: torch.device) -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _restore_rng(directory: Path, meta: dict[str, Any], ranks: Ranks) -> None:
    if meta["world_size"] != ranks.mesh.world_size:
        logger.warning(
            f"{directory} was saved by {meta['world_size']} ranks and is continued by {ranks.mesh.world_size}: "
            "random state starts from --seed"
        )
        return
    state = torch.load(_rng_path(directory, ranks.mesh.rank), weights_only=True)
    torch.set_rng_state(state["cpu"])
    if ranks.device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], ranks.device)
