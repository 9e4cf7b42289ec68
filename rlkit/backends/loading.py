"""Reads a Hugging Face safetensors checkpoint tensor by tensor, or a few rows of one. Called by `model.py` and
`export.py`.
"""

import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from rlkit.algo.fp8 import BLOCK, dequantise
from rlkit.config.quantization import SCALE_SUFFIX
from rlkit.types.errors import CheckpointError

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
"""Dtypes of weights that can be trained on as they are. fp8 in blocks is dequantised, others need converting first."""
FP8 = "F8_E4M3"


class CheckpointReader:
    """The tensors of one checkpoint folder. Files are memory-mapped: only what is asked for is read."""

    def __init__(self, path: Path) -> None:
        """A folder with `config.json`. Weights may be absent: a run that resumes does not read them."""
        if not (path / "config.json").is_file():
            raise CheckpointError(f"{path} is no Hugging Face checkpoint: it has no config.json")
        self.path = path
        self._file_of = _tensor_files(path)
        self._files = {file: safe_open(path / file, framework="pt") for file in set(self._file_of.values())}

    def check_names(self, wanted: Sequence[str], *, tied: set[str]) -> None:
        """Every wanted tensor must be there. What nobody wants is logged, but for tied copies and rotary tables."""
        if not self._file_of:
            raise CheckpointError(
                f"{self.path} has neither {SINGLE} nor {INDEX}; "
                "save it with transformers' save_pretrained, which writes safetensors"
            )
        missing = [name for name in wanted if name not in self._file_of]
        if missing:
            raise CheckpointError(
                f"{self.path} lacks {len(missing)} of the {len(wanted)} tensors of its architecture "
                f"({_some(missing)}); it has {_some(self._file_of)}. Is it complete, and saved for this architecture?"
            )
        extra = self._file_of.keys() - set(wanted) - tied - {name + SCALE_SUFFIX for name in wanted}
        extra = [name for name in sorted(extra) if not name.endswith("rotary_emb.inv_freq")]
        if extra:
            logger.warning(f"{self.path}: ignoring {len(extra)} tensors unknown to the architecture: {_some(extra)}")

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds a tensor of this name."""
        return name in self._file_of

    def dtype(self, name: str) -> torch.dtype:
        """How the tensor is stored, fp8 in blocks as bfloat16; or without any weights what `config.json` says.
        CheckpointError if quantised in another way.
        """
        if not self._file_of:
            config = json.loads((self.path / "config.json").read_text())
            return getattr(torch, config.get("dtype") or config.get("torch_dtype") or "float32")
        stored = self._slice(name).get_dtype()
        if stored == FP8 and name + SCALE_SUFFIX in self._file_of:
            return torch.bfloat16
        if stored not in DTYPES:
            raise CheckpointError(
                f"{self.path}: {name} is stored as {stored}; convert the checkpoint to bfloat16 first"
            )
        return DTYPES[stored]

    def read_rows(self, name: str, shape: tuple[int, ...], first: int, count: int) -> Tensor:
        """Rows [first, first + count) of a tensor whose whole shape must be `shape`, on the CPU: as stored, or from fp8
        in float32, which loses nothing.
        """
        stored = self._slice(name)
        if tuple(stored.get_shape()) != shape:
            raise CheckpointError(
                f"{self.path}: {name} has shape {tuple(stored.get_shape())}, but config.json implies {shape}; "
                "they do not belong together"
            )
        self.dtype(name)
        if stored.get_dtype() == FP8:
            return self._dequantised_rows(name, first, count)
        return stored[first : first + count] if shape else stored[:]

    def _dequantised_rows(self, name: str, first: int, count: int) -> Tensor:
        rows = self._slice(name)[first : first + count]
        begin, end = first // BLOCK[0], -(-(first + count) // BLOCK[0]) if count else first // BLOCK[0]
        scale = self._slice(name + SCALE_SUFFIX)[begin:end]
        try:
            return dequantise(rows, scale, dtype=torch.float32, first_row=first)
        except ValueError as error:
            raise CheckpointError(f"{self.path}: {name}: {error}") from error

    def _slice(self, name: str):
        return self._files[self._file_of[name]].get_slice(name)


def _tensor_files(path: Path) -> dict[str, str]:
    """Tensor name -> file name; empty where there are no weights."""
    if (path / INDEX).is_file():
        return dict(json.loads((path / INDEX).read_text())["weight_map"])
    if not (path / SINGLE).is_file():
        return {}
    with safe_open(path / SINGLE, framework="pt") as file:
        return dict.fromkeys(file.keys(), SINGLE)


def _some(names: Iterable[str]) -> str:
    chosen = sorted(names)
    return ", ".join(chosen[:4]) + (", ..." if len(chosen) > 4 else "")
