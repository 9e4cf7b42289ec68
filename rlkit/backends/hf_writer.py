"""Files of a Hugging Face checkpoint, written tensor by tensor. Used by the backends' exports and the converters."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from rlkit.backends.loading import INDEX, SINGLE
from rlkit.types.weights import WeightSpec

MAX_FILE_BYTES = 5 * 1024**3
WEIGHT_SUFFIXES = frozenset((".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"))


class HfWriter:
    """Collects tensors in the order of `specs` and writes a file whenever the next one would be too large."""

    def __init__(self, directory: Path, specs: list[WeightSpec], max_file_bytes: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        # written last: until then the folder, which may hold an older export, is no checkpoint
        (directory / "config.json").unlink(missing_ok=True)
        self._directory = directory
        self._file_of = _plan_files(specs, max_file_bytes)
        self._total_bytes = sum(spec.num_bytes for spec in specs)
        self._pending: dict[str, Tensor] = {}
        self._current: str | None = None

    def add(self, name: str, tensor: Tensor) -> None:
        if self._current is not None and self._file_of[name] != self._current:
            self._flush()
        self._current = self._file_of[name]
        # a copy in any case: the bucket's memory is used again
        self._pending[name] = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)

    def finish(self) -> None:
        self._flush()
        if len(set(self._file_of.values())) > 1:
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": self._file_of}
            (self._directory / INDEX).write_text(json.dumps(index, indent=2))

    def _flush(self) -> None:
        assert self._current is not None
        path = self._directory / self._current
        save_file(self._pending, path, metadata={"format": "pt"})
        path.chmod(0o644)  # safetensors makes files that only their owner may read
        self._pending = {}


def _plan_files(specs: list[WeightSpec], max_file_bytes: int) -> dict[str, str]:
    """Tensor name -> file name, in transformers' naming."""
    number_of: dict[str, int] = {}
    number, used = 0, 0
    for spec in specs:
        if used and used + spec.num_bytes > max_file_bytes:
            number, used = number + 1, 0
        number_of[spec.name] = number
        used += spec.num_bytes
    if number == 0:
        return dict.fromkeys(number_of, SINGLE)
    return {name: f"model-{n + 1:05d}-of-{number + 1:05d}.safetensors" for name, n in number_of.items()}


def copy_companions(source: Path, directory: Path) -> None:
    """Every file beside the weights: configuration, tokenizer, generation settings, chat template, remote code."""
    files = [path for path in sorted(source.iterdir()) if path.is_file() and not path.name.startswith(".")]
    for path in sorted(files, key=lambda path: path.name == "config.json"):
        if path.name == "config.json":
            (directory / path.name).write_text(plain_config(path.read_text(encoding="utf-8")), encoding="utf-8")
        elif path.suffix not in WEIGHT_SUFFIXES and not path.name.endswith(".index.json"):
            shutil.copyfile(path, directory / path.name)


def plain_config(text: str) -> str:
    """A `config.json` as it is, or without its `quantization_config`: exported weights are not quantised."""
    config = json.loads(text)
    if config.pop("quantization_config", None) is None:
        return text
    return json.dumps(config, indent=2) + "\n"
