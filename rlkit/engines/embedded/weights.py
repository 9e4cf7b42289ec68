"""The model's weights by name: loading new ones, putting them to sleep, comparing and checksumming.

Runs on the engine thread. Names are Hugging Face parameter names; a tied tensor goes by its first name.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from rlkit.algo.fp8 import dequantised, grid
from rlkit.config.quantization import SCALE_SUFFIX
from rlkit.types.errors import EngineError
from rlkit.types.weights import tensor_checksum

IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
"""Tensors of old checkpoints that models compute themselves."""


class WeightStore:
    """Parameters and saved buffers of one model, in place."""

    def __init__(self, model: nn.Module) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._tied: set[str] = set()
        first_name: dict[int, str] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            if first_name.setdefault(id(tensor), name) == name:
                self._tensors[name] = tensor.detach()
            else:
                self._tied.add(name)
        self._expert_parts = _expert_parts(self._tensors)
        self._num_bytes = {name: tensor.untyped_storage().nbytes() for name, tensor in self._tensors.items()}
        self._snapshot: dict[str, Tensor] | None = None
        self.is_asleep = False
        self._come: dict[str, set[str]] = {}
        """Parts of fused experts that have come since the last sleep."""
        self.stale: set[str] = set()
        """Names that hold nothing since the last sleep: generation is refused until they are loaded."""

    def load_all(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Like `load`, but nothing changes when one of them does not fit."""
        self.check((name, tensor.shape) for name, tensor in named)
        self.load(named)

    def load(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Copy tensors in, cast to the model's dtype. The second name of a tied tensor is skipped, as in SGLang.
        Weights in fp8 are multiplied by their scales, which must be among `named` too.
        """
        try:
            for name, tensor in dequantised(named):
                target = self._target(name, tuple(tensor.shape))
                if target is not None:
                    target.copy_(tensor)
                    self._loaded(name)
        except ValueError as error:
            raise EngineError(f"cannot dequantise {error}") from error

    def check(self, named_shapes: Iterable[tuple[str, Sequence[int]]]) -> None:
        """EngineError for the first name or shape that does not belong to the model. Changes nothing."""
        for name, shape in named_shapes:
            self._target(name, tuple(shape))

    def load_folder(self, folder: Path) -> None:
        """Copy a Hugging Face safetensors checkpoint in, after checking that it is complete and fits."""
        if not folder.is_dir():
            raise EngineError(f"{folder} is not a folder")
        index = folder / "model.safetensors.index.json"
        if index.exists():
            files = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
        else:
            files = sorted(folder.glob("*.safetensors"))
        shapes: dict[str, list[int]] = {}
        for file in files:
            with safe_open(file, framework="pt") as tensors:
                shapes |= {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
        self.check(shapes.items())
        fused = {fused for fused, parts in self._expert_parts.items() if parts.keys() <= shapes.keys()}
        missing = sorted(self._tensors.keys() - shapes.keys() - fused)
        if missing:
            raise EngineError(f"{folder} lacks {len(missing)} tensors, the first is {missing[0]}")
        self.load(_read(files))

    def _target(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        if name.endswith(SCALE_SUFFIX):
            weight = self._find(name.removesuffix(SCALE_SUFFIX))
            if weight is None or weight.dim() != 2 or grid(weight.shape) != shape:
                raise EngineError(f"{name} with shape {list(shape)} are the scales of no weight of the model")
            return None
        if name in self._tied or name.endswith(IGNORED_SUFFIXES):
            return None
        target = self._find(name)
        if target is None:
            raise EngineError(f"the model has no tensor {name}")
        if tuple(target.shape) != shape:
            raise EngineError(f"{name} has shape {list(shape)}, the model's is {list(target.shape)}")
        return target

    def _find(self, name: str) -> Tensor | None:
        """A tensor of the model, or the part of one that holds a single expert."""
        target = self._tensors.get(name)
        if target is None:
            target = next((parts[name] for parts in self._expert_parts.values() if name in parts), None)
        return target

    def _loaded(self, name: str) -> None:
        """Note that a tensor holds weights; the fused experts of a layer do when the last of their parts came."""
        self.stale.discard(name)
        for fused, parts in self._expert_parts.items():
            if name in parts and fused in self.stale:
                come = self._come.setdefault(fused, set())
                come.add(name)
                if len(come) == len(parts):
                    self.stale.discard(fused)

    def sleep(self) -> None:
        """Free the memory; what it held is lost."""
        if self.is_asleep:
            raise EngineError("weights are released already")
        self.is_asleep = True
        for tensor in self._tensors.values():
            tensor.untyped_storage().resize_(0)

    def wake(self) -> None:
        """Allocate again. Values are NaN until loaded, so that forgotten ones cannot pass for weights."""
        if not self.is_asleep:
            raise EngineError("weights are not released")
        self.is_asleep = False
        for name, tensor in self._tensors.items():
            tensor.untyped_storage().resize_(self._num_bytes[name])
            tensor.fill_(torch.nan if tensor.is_floating_point() else 0)
        self.stale = set(self._tensors)
        self._come = {}
        self._expert_parts = _expert_parts(self._tensors)

    # What `/weights_checker` does; actions and answer as in SGLang, except that checksums are SHA-256.

    def checker(self, action: str) -> dict[str, Any] | None:
        """Carry out an action; the checksum payload of this rank for `checksum`, else None."""
        match action:
            case "checksum":
                return self._checksums()
            case "snapshot":
                self._snapshot = {name: tensor.clone().cpu() for name, tensor in self._tensors.items()}
            case "reset_tensors":
                for tensor in self._tensors.values():
                    tensor.copy_(torch.rand(tensor.shape))
            case "compare":
                self._compare()
            case _:
                raise EngineError(f"Unsupported action={action!r}")
        return None

    def _compare(self) -> None:
        if self._snapshot is None:
            raise EngineError("compare needs a snapshot; call the action snapshot first")
        different = [
            name for name, tensor in self._tensors.items() if not torch.equal(tensor.cpu(), self._snapshot[name])
        ]
        if different:
            raise EngineError(f"check tensor equality failed: {', '.join(different)}")

    def _checksums(self) -> dict[str, Any]:
        checksums = {name: tensor_checksum(tensor) for name, tensor in self._tensors.items()}
        overall = hashlib.sha256()
        for name in sorted(checksums):
            overall.update(name.encode())
            overall.update(checksums[name].encode())
        ranks = dict.fromkeys(("tp_rank", "dp_rank", "pp_rank", "rank"), 0)
        sizes = dict.fromkeys(("tp_size", "dp_size", "pp_size", "size"), 1)
        return {
            "checksums": checksums,
            "per_gpu_checksum": overall.hexdigest(),
            "parallelism_info": ranks | sizes,
        }


def _read(files: Sequence[Path]) -> Iterator[tuple[str, Tensor]]:
    """One tensor in memory at a time."""
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # not a dict: it cannot be iterated
                yield name, tensors.get_tensor(name)


def _expert_parts(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """For each parameter in which transformers fuses the experts of a layer: the matrices of the single experts, as
    views under the names that checkpoints and Megatron give them.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        prefix, is_experts, kind = name.partition(".experts.")
        if not is_experts or tensor.dim() != 3 or kind not in ("gate_up_proj", "down_proj"):
            continue
        parts: dict[str, Tensor] = {}
        for expert, matrix in enumerate(tensor):
            split = zip(("gate", "up"), matrix.chunk(2), strict=True) if kind == "gate_up_proj" else [("down", matrix)]
            parts |= {f"{prefix}.experts.{expert}.{part}_proj.weight": view for part, view in split}
        found[name] = parts
    return found
