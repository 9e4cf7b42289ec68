"""Saves and loads what a run needs to continue as if it had never stopped. Called by `backend.py`.

<directory>/dcp/            model, moments and step counts, in torch's format that any number of ranks can read; or
           /full_state.pt   the same in one file, with --fsdp-full-params (`stored.py`)
           /rng_rank<r>.pt  random state of each rank
           /trainer.json    step, optimizer steps, loss scale, ranks; written last

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
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from rlkit.backends.fsdp.model import ScoringModel, first_local_row, saved_tensors
from rlkit.backends.fsdp.optimizer import ShardOptimizer
from rlkit.backends.fsdp.stored import FULL, SHARDS, full_state, is_full, nested, stored_shapes
from rlkit.backends.sharded_files import ShardedFiles
from rlkit.config.schema import LoraConfig
from rlkit.dist.collectives import barrier, gather_rows
from rlkit.dist.groups import RankMesh
from rlkit.types.errors import CheckpointError

logger = logging.getLogger(__name__)

FORMAT = 1
META = "trainer.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerMeta:
    step: int
    """The step after which it was saved."""
    optimizer_steps: int
    """Optimizer steps taken until then: the state of the schedule."""
    world_size: int
    critic_optimizer_steps: int = 0
    """The same of PPO's critic, which may have begun earlier."""
    loss_scale: Mapping[str, float] | None = None
    """`LossScale.state()`; None in checkpoints of before float16."""
    lora: Mapping[str, Any] | None = None
    """The `LoraConfig` of the adapters that are all that was saved of the model; None where the model itself was."""
    format: int = FORMAT


@dataclass(frozen=True, kw_only=True, slots=True)
class StateCopy:
    """What one rank saves, as it was when it was copied."""

    tensors: Mapping[str, Tensor]
    """Shards as DTensors, the rest whole. With `is_full` whole tensors on rank 0, nothing on the others."""
    is_full: bool
    rng: Mapping[str, Tensor]
    meta: TrainerMeta


def tensors_to_save(model: ScoringModel, optimizer: ShardOptimizer | None) -> dict[str, Tensor]:
    return {**_model_state(model), **(optimizer.sharded_state() if optimizer is not None else {})}


def copy_state(
    tensors: Mapping[str, Tensor],
    mesh: RankMesh,
    read: Callable[[Tensor], Tensor],
    *,
    host_mesh: DeviceMesh,
    meta: TrainerMeta,
    is_full: bool,
    to_host: bool,
) -> StateCopy:
    """`read` gives the host copy of a plain tensor (`HostSwap.hold` made it), or the tensor itself. `host_mesh` is
    `cpu_mesh`'s. With `is_full` shards are gathered, which makes it collective, to rank 0's host memory (`to_host`) or
    device.
    """
    copied = {name: _laid_out(tensor, host_mesh, read) for name, tensor in tensors.items()}
    if is_full:
        copied = _gathered(copied, mesh, to_host=to_host)
    return StateCopy(tensors=copied, is_full=is_full, rng=_rng_state(mesh.device), meta=meta)


def _laid_out(tensor: Tensor, host_mesh: DeviceMesh, read: Callable[[Tensor], Tensor]) -> Tensor:
    if not isinstance(tensor, DTensor):
        return read(tensor.detach())
    local = read(tensor.to_local().detach())
    return DTensor.from_local(
        local,
        host_mesh if local.is_cpu else tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def _gathered(tensors: Mapping[str, Tensor], mesh: RankMesh, *, to_host: bool) -> dict[str, Tensor]:
    """Whole tensors on rank 0, one at a time, each in memory of its own."""
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        full = gather_rows(tensor.to_local(), tensor.shape[0], mesh) if isinstance(tensor, DTensor) else tensor
        if mesh.is_main:
            whole[name] = full.to("cpu", copy=True) if to_host else full.clone()
    return whole


def write(directory: Path, state: StateCopy, mesh: RankMesh, *, group: ProcessGroup | None = None) -> None:
    """Write the copy, durably. Collective over `group` (default: all ranks); returns when all ranks are done.

    With a group of its own (gloo) it may run beside training.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with _without_checksums():
        if not state.is_full:
            # the files are synced below, all at once: one after the other, each would wait for the disk alone
            writer = FileSystemWriter(directory / SHARDS, sync_files=False, thread_count=num_writers(mesh))
            save(dict(state.tensors), storage_writer=writer, process_group=group)
        elif mesh.is_main:
            torch.save(nested(state.tensors), directory / FULL)
    torch.save(dict(state.rng), _rng_path(directory, mesh.rank))
    if not state.is_full:
        sync_files(directory / SHARDS)
    barrier(group)
    if mesh.is_main:
        path = directory / META
        path.write_text(json.dumps(asdict(state.meta), indent=2))
        sync_files(directory)
    barrier(group)


def num_writers(mesh: RankMesh) -> int:
    """Threads, and so files, of each rank; the ranks of a node share its cores."""
    cores = os.cpu_count() or 1
    return max(1, min(8, cores // min(mesh.world_size, 8)))


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
    directory: Path,
    model: ScoringModel,
    optimizer: ShardOptimizer,
    mesh: RankMesh,
    *,
    with_optimizer: bool,
    lora: LoraConfig | None = None,
) -> TrainerMeta:
    """Fill model and (with `with_optimizer`) optimizer and random state in place. Collective.

    The number of ranks may differ from the one that saved; only the random state is then left as it is, with a warning.
    """
    meta = read_meta(directory)
    if lora is not None and meta.lora is not None and lora.lora_alpha != meta.lora["lora_alpha"]:
        raise CheckpointError(
            f"{directory} was trained with --lora-alpha {meta.lora['lora_alpha']:g}, this run has {lora.lora_alpha:g}, "
            "which would make another model of the same adapters; pass the old value"
        )
    load_tensors(directory, tensors_to_save(model, optimizer if with_optimizer else None), mesh)
    if with_optimizer:
        _restore_rng(directory, meta, mesh)
    return meta


def load_tensors(directory: Path, state: dict[str, Tensor], mesh: RankMesh) -> None:
    """Fill the tensors in place with what the checkpoint holds under their names. Collective."""
    _check_shapes(directory, state)
    if is_full(directory):
        _take_rows(full_state(directory), state, mesh)
    else:
        load(state, storage_reader=ShardedFiles(directory / SHARDS))


def _model_state(model: ScoringModel) -> Mapping[str, Tensor]:
    """The very tensors of the model, detached: loading fills them in place."""
    return {f"model.{name}": tensor.detach() for name, tensor in saved_tensors(model)}


def _take_rows(whole: Mapping[str, Tensor], state: Mapping[str, Tensor], mesh: RankMesh) -> None:
    for name, tensor in state.items():
        if isinstance(tensor, DTensor):
            local, first = tensor.to_local(), first_local_row(tensor, mesh)
            local.copy_(whole[name][first : first + local.shape[0]])
        else:
            tensor.copy_(whole[name])


def _check_shapes(directory: Path, state: Mapping[str, Tensor]) -> None:
    stored = stored_shapes(directory)
    for name, tensor in state.items():
        size = stored.get(name)
        if size != tuple(tensor.shape):
            found = "no such tensor" if size is None else f"shape {size}"
            raise CheckpointError(
                f"{directory} does not fit this run: {name} has shape {tuple(tensor.shape)} here, "
                f"and the checkpoint has {found}. Continue with the --hf-checkpoint that it was trained from and the "
                "same trained parameters (--lora-..., --freeze-params-name-list, --only-train-params-name-list)"
            )


def read_meta(directory: Path) -> TrainerMeta:
    """What the checkpoint says of the trainer; CheckpointError where it is not complete, or of another format."""
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
    if meta.world_size != mesh.world_size:
        logger.warning(
            f"{directory} was saved by {meta.world_size} ranks and is continued by {mesh.world_size}: "
            "random state starts from --seed"
        )
        return
    state = torch.load(_rng_path(directory, mesh.rank), weights_only=True)
    torch.set_rng_state(state["cpu"])
    if mesh.device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], mesh.device)
