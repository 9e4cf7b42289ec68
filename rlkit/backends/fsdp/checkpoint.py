"""Saves and loads what a run needs to continue as if it had never stopped. Called by `backend.py`.

<directory>/dcp/            model, moments and step counts, in torch's format that any number of ranks can read
           /rng_rank<r>.pt  random state of each rank
           /trainer.json    step, optimizer steps, ranks; written last

A save has two halves. `copy_state` takes a copy in host memory, which is all that training has to wait for; `write`
brings it to the disk, in the same thread or, with `--async-save`, in another.
"""

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from rlkit.backends.fsdp.model import ScoringModel, named_persistent_buffers, named_shards
from rlkit.backends.fsdp.optimizer import ShardOptimizer
from rlkit.dist.collectives import barrier
from rlkit.dist.groups import RankMesh
from rlkit.types.errors import CheckpointError

logger = logging.getLogger(__name__)

FORMAT = 1
META = "trainer.json"
STATE = "dcp"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerMeta:
    step: int
    """The step after which it was saved."""
    optimizer_steps: int
    """Optimizer steps taken until then: the state of the schedule."""
    world_size: int
    format: int = FORMAT


@dataclass(frozen=True, kw_only=True, slots=True)
class StateCopy:
    """What one rank saves, as it was when it was copied."""

    tensors: Mapping[str, Tensor]
    """Shards as DTensors, the rest whole; on the CPU."""
    rng: Mapping[str, Tensor]
    meta: TrainerMeta


def tensors_to_save(model: ScoringModel, optimizer: ShardOptimizer) -> dict[str, Tensor]:
    return {**_model_state(model), **optimizer.sharded_state()}


def copy_state(
    tensors: Mapping[str, Tensor],
    mesh: RankMesh,
    read: Callable[[Tensor], Tensor],
    *,
    host_mesh: DeviceMesh,
    step: int,
    optimizer_steps: int,
) -> StateCopy:
    """`read` gives the host copy of a plain tensor (`HostSwap.hold` made it), or the tensor itself. `host_mesh` is
    `cpu_mesh`'s.
    """
    return StateCopy(
        tensors={name: _on_host(tensor, host_mesh, read) for name, tensor in tensors.items()},
        rng=_rng_state(mesh.device),
        meta=TrainerMeta(step=step, optimizer_steps=optimizer_steps, world_size=mesh.shard_size),
    )


def _on_host(tensor: Tensor, host_mesh: DeviceMesh, read: Callable[[Tensor], Tensor]) -> Tensor:
    if not isinstance(tensor, DTensor):
        return read(tensor)
    return DTensor.from_local(
        read(tensor.to_local().detach()),
        host_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def write(directory: Path, state: StateCopy, mesh: RankMesh, *, group: ProcessGroup | None = None) -> None:
    """Write the copy, durably. Collective over `group` (default: all ranks); returns when all ranks are done.

    With a group of its own (gloo) it may run beside training.
    """
    directory.mkdir(parents=True, exist_ok=True)
    # the files are synced below, all at once: one after the other, each would wait for the disk alone
    writer = FileSystemWriter(directory / STATE, sync_files=False, thread_count=num_writers(mesh))
    with _without_checksums():
        save(dict(state.tensors), storage_writer=writer, process_group=group)
    torch.save(dict(state.rng), _rng_path(directory, mesh.rank))
    sync_files(directory / STATE)
    barrier(group)
    if mesh.is_main:
        path = directory / META
        path.write_text(json.dumps(asdict(state.meta), indent=2))
        sync_files(directory)
    barrier(group)


def num_writers(mesh: RankMesh) -> int:
    """Threads, and so files, of each rank; the ranks of a node share its cores."""
    cores = os.cpu_count() or 1
    return max(1, min(8, cores // min(mesh.shard_size, 8)))


def sync_files(directory: Path) -> None:
    """Make the files in `directory` survive a power loss. Ranks do it for each other's files too: it is free then."""
    with ThreadPoolExecutor(max_workers=8) as pool:
        list(pool.map(_sync, [path for path in directory.iterdir() if path.is_file()]))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _without_checksums() -> Iterator[None]:
    """torch.save sums up every byte while it holds Python's lock; whole files have digests of their own later."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


class BackgroundWrite:
    """A `write` that goes on while the next step runs."""

    def __init__(self, task: Callable[[], None]) -> None:
        self._task = task
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="save", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Until it is written. Raises what the writing raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._task()
        except BaseException as error:
            self._error = error  # raised by `wait`


def load_checkpoint(
    directory: Path, model: ScoringModel, optimizer: ShardOptimizer, mesh: RankMesh, *, with_optimizer: bool
) -> TrainerMeta:
    """Fill model and (with `with_optimizer`) optimizer and random state in place. Collective.

    The number of ranks may differ from the one that saved; only the random state is then left as it is, with a warning.
    """
    meta = _read_meta(directory)
    state: dict[str, Tensor] = dict(_model_state(model))
    if with_optimizer:
        state |= optimizer.sharded_state()
    _check_shapes(directory, state)
    load(state, checkpoint_id=directory / STATE)
    if with_optimizer:
        _restore_rng(directory, meta, mesh)
    return meta


def _model_state(model: ScoringModel) -> Mapping[str, Tensor]:
    """The very tensors of the model, detached: loading fills them in place."""
    entries = [*named_shards(model), *named_persistent_buffers(model)]
    return {f"model.{name}": tensor.detach() for name, tensor in entries}


def _check_shapes(directory: Path, state: Mapping[str, Tensor]) -> None:
    stored = FileSystemReader(directory / STATE).read_metadata().state_dict_metadata
    for name, tensor in state.items():
        size = getattr(stored.get(name), "size", None)  # metadata of non-tensors has none
        if size is None or tuple(size) != tuple(tensor.shape):
            found = "no such tensor" if size is None else f"shape {tuple(size)}"
            raise CheckpointError(
                f"{directory} does not fit this run: {name} has shape {tuple(tensor.shape)} here, "
                f"and the checkpoint has {found}. Continue with the --hf-checkpoint that it was trained from"
            )


def _read_meta(directory: Path) -> TrainerMeta:
    path = directory / META
    if not path.is_file():
        raise CheckpointError(f"{directory} holds no complete trainer checkpoint: {META} is missing")
    fields = json.loads(path.read_text())
    if fields.get("format") != FORMAT:
        raise CheckpointError(f"{path} has format {fields.get('format')}, this version of rlkit reads {FORMAT}")
    return TrainerMeta(**fields)


def _rng_path(directory: Path, rank: int) -> Path:
    return directory / f"rng_rank{rank}.pt"


def _rng_state(device: torch.device) -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _restore_rng(directory: Path, meta: TrainerMeta, mesh: RankMesh) -> None:
    if meta.world_size != mesh.shard_size:
        logger.warning(
            f"{directory} was saved by {meta.world_size} ranks and is continued by {mesh.shard_size}: "
            "random state starts from --seed"
        )
        return
    state = torch.load(_rng_path(directory, mesh.rank), weights_only=True)
    torch.set_rng_state(state["cpu"])
    if mesh.device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], mesh.device)
