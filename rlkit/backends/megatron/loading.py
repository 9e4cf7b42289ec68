"""Fills a Megatron model from a Hugging Face checkpoint: every rank reads its own slices. Called by `backend.py`."""

import torch
import torch.nn.functional as F
from torch import Tensor

from rlkit.backends.loading import CheckpointReader
from rlkit.backends.megatron.model import Model
from rlkit.backends.megatron.names import HEAD, Entry, Piece, entries
from rlkit.backends.megatron.parallel import Axis, Ranks


def model_entries(model: Model, ranks: Ranks) -> list[Entry]:
    """All parameters of the whole model, the same list on every rank."""
    return entries(model.architecture, model.dealt, expert_ranks=ranks.expert.size)


def is_mine(entry: Entry, model: Model, ranks: Ranks) -> bool:
    """Whether this rank holds (a part of) the parameter."""
    if entry.stage != ranks.pipeline.rank:
        return False
    if entry.expert is None:
        return True
    assert model.architecture.experts is not None
    return entry.expert * ranks.expert.size // model.architecture.experts.num_experts == ranks.expert.rank


def tensor_axis(entry: Entry, ranks: Ranks) -> Axis:
    """The ranks over which the entry's pieces are dealt."""
    return ranks.tensor if entry.expert is None else ranks.expert_tensor


def load_hf_weights(model: Model, reader: CheckpointReader, ranks: Ranks) -> None:
    """Raises CheckpointError where tensors are missing, have another shape or are quantised."""
    all_entries = model_entries(model, ranks)
    names = [piece.name for entry in all_entries for piece in entry.pieces if not entry.is_copy]
    reader.check_names(names, tied={HEAD} if model.architecture.is_tied else set())
    tensors = model.tensors()
    with torch.no_grad():
        for entry in all_entries:
            if not is_mine(entry, model, ranks):
                continue
            target = tensors.pop((entry.chunk, entry.path))
            axis = tensor_axis(entry, ranks)
            parts = [_slice(reader, piece, axis) for piece in entry.pieces]
            packed = entry.pack(parts)
            assert packed.shape == target.shape, f"{entry.path}: {tuple(packed.shape)}, not {tuple(target.shape)}"
            target.copy_(packed)
    assert not tensors.keys() & dict(model.named_parameters()).keys(), f"never filled: {sorted(tensors)}"


def _slice(reader: CheckpointReader, piece: Piece, axis: Axis) -> Tensor:
    """This rank's part; rows that the vocabulary lacks are zero."""
    if piece.axis is None or axis.size == 1:
        return reader.read_rows(piece.name, piece.shape, 0, piece.shape[0])
    each = -(-piece.shape[piece.axis] // axis.size)
    first = min(axis.rank * each, piece.shape[piece.axis])
    count = min(each, piece.shape[piece.axis] - first)
    if piece.axis == 0:
        part = reader.read_rows(piece.name, piece.shape, first, count)
        return F.pad(part, (0, 0) * (part.dim() - 1) + (0, each - count)) if count < each else part
    return reader.read_rows(piece.name, piece.shape, 0, piece.shape[0])[:, first : first + count]
