"""This rank's part of the fingerprints of what a checkpoint would hold. Called by `backend.py`.

Not collective: a segment of a main parameter is mixed with the places that its elements have in the whole Hugging Face
tensors. Those places are packed as the weights themselves are, so the rules in `names.py` serve for both.
"""

import torch
from torch import Tensor

from rlkit.backends.megatron.checkpoint import MOMENTS
from rlkit.backends.megatron.loading import is_mine, model_entries, tensor_axis
from rlkit.backends.megatron.model import Model
from rlkit.backends.megatron.names import Entry, Piece
from rlkit.backends.megatron.optimizer import MainOptimizer
from rlkit.backends.megatron.parallel import Axis, Ranks
from rlkit.backends.mixing import INTEGER, mix_
from rlkit.types.fingerprints import WEIGHTS, WORD

PIECE_SHIFT = 56
"""Above the place in its tensor, an element's code has the number of its piece."""


def live_sums(model: Model, optimizer: MainOptimizer, ranks: Ranks) -> dict[str, int]:
    """Sums by name in the checkpoint. What several ranks hold alike is counted on one of them."""
    totals: dict[str, Tensor] = {}
    tensors = model.tensors()
    segments = optimizer.segments_by_key()
    for entry in model_entries(model, ranks):
        if entry.is_copy or not is_mine(entry, model, ranks):
            continue
        key = (entry.chunk, entry.path)
        axis = tensor_axis(entry, ranks)
        codes = _codes(entry, axis, ranks.device).reshape(-1)
        if key not in optimizer.groups:  # a buffer, whole on every rank of its stage
            if ranks.data.rank == 0 and ranks.tensor.rank == 0:
                _add(totals, WEIGHTS, entry, tensors[key].reshape(-1), codes)
            continue
        for segment in segments.get(key, ()):
            if not segment.is_counted:
                continue
            part = codes[segment.start : segment.stop]
            _add(totals, WEIGHTS, entry, segment.main.detach(), part)
            for name in MOMENTS:
                _add(totals, f"{name}.", entry, optimizer.moment(segment, name), part)
            if segment.start == 0 and (axis.rank == 0 or entry.pieces[0].axis is None):
                count = torch.tensor([float(optimizer.num_steps)], device=ranks.device)
                for number in range(len(entry.pieces)):
                    _add(totals, "step.", entry, count, torch.tensor([number << PIECE_SHIFT], device=ranks.device))
    if not totals:
        return {}
    values = torch.stack(list(totals.values())).tolist()
    return {name: value % WORD for name, value in zip(totals, values, strict=True)}


def _codes(entry: Entry, axis: Axis, device: torch.device) -> Tensor:
    """int64, laid out like the parameter: number of the piece and place in it, -1 in padding."""
    return entry.pack([_places(piece, axis, device, number) for number, piece in enumerate(entry.pieces)])


def _places(piece: Piece, axis: Axis, device: torch.device, number: int) -> Tensor:
    ranges = [torch.arange(size, dtype=torch.int64, device=device) for size in piece.shape]
    if piece.axis is not None and axis.size > 1:
        size = piece.shape[piece.axis]
        each = -(-size // axis.size)
        mine = torch.arange(axis.rank * each, (axis.rank + 1) * each, dtype=torch.int64, device=device)
        ranges[piece.axis] = mine
    places = torch.zeros((), dtype=torch.int64, device=device)
    inside = torch.ones((), dtype=torch.bool, device=device)
    for dim, indices in enumerate(ranges):
        shape = [1] * len(ranges)
        shape[dim] = -1
        places = places * piece.shape[dim] + indices.view(shape)
        inside = inside & (indices < piece.shape[dim]).view(shape)
    return torch.where(inside, places + (number << PIECE_SHIFT), -1)


def _add(totals: dict[str, Tensor], prefix: str, entry: Entry, values: Tensor, codes: Tensor) -> None:
    bits = values.contiguous().view(INTEGER[values.element_size()])
    places = codes & ((1 << PIECE_SHIFT) - 1)
    mixed = mix_(places.clone(), bits)
    for number, piece in enumerate(entry.pieces):
        name = prefix + piece.name
        total = torch.where((codes >= 0) & (codes >> PIECE_SHIFT == number), mixed, 0).sum()
        totals[name] = totals[name] + total if name in totals else total
