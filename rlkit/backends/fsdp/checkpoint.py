"""Saves and loads what a run needs to continue as if it had never stopped. Called by `backend.py`.

<directory>/dcp/            model, moments and step counts, in torch's format that any number of ranks can read
           /rng_rank<r>.pt  random state of each rank
           /trainer.json    step, optimizer steps, ranks; written last
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

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


def save_checkpoint(
    directory: Path, model: ScoringModel, optimizer: ShardOptimizer, mesh: RankMesh, *, step: int, optimizer_steps: int
) -> None:
    """Write everything. Collective; returns when all ranks are done."""
    directory.mkdir(parents=True, exist_ok=True)
    state: dict[str, Tensor] = {**_model_state(model), **optimizer.sharded_state()}
    save(state, checkpoint_id=directory / STATE)
    torch.save(_rng_state(mesh.device), _rng_path(directory, mesh.rank))
    barrier()
    if mesh.is_main:
        meta = TrainerMeta(step=step, optimizer_steps=optimizer_steps, world_size=mesh.data_size)
        (directory / META).write_text(json.dumps(asdict(meta), indent=2))
    barrier()


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
    if meta.world_size != mesh.data_size:
        logger.warning(
            f"{directory} was saved by {meta.world_size} ranks and is continued by {mesh.data_size}: "
            "random state starts from --seed"
        )
        return
    state = torch.load(_rng_path(directory, mesh.rank), weights_only=True)
    torch.set_rng_state(state["cpu"])
    if mesh.device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], mesh.device)
