"""Weights as they arrive at the embedded engine: handles in a pickle, or broadcasts from a process group.

The wire formats are SGLang's. A pickle from the network is only allowed to build tensors and plain values.
"""

import base64
import binascii
import io
import pickle
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlkit.types.errors import EngineError

FLATTENED_BUCKET = "flattened_bucket"
NamedTensors = list[tuple[str, Tensor]]

ALLOWED_CLASSES = {
    "torch": {"Tensor", "Size", "Parameter", "device"},
    "torch.nn.parameter": {"Parameter"},
    "torch.storage": {"UntypedStorage", "TypedStorage"},
    "torch._utils": {"_rebuild_tensor_v2", "_rebuild_parameter"},
    "torch.multiprocessing.reductions": {
        "rebuild_tensor",
        "rebuild_cuda_tensor",
        "rebuild_typed_storage",
        "rebuild_typed_storage_child",
        "rebuild_storage_filename",
        "rebuild_storage_empty",
    },
    "types": {"SimpleNamespace"},
    "collections": {"OrderedDict"},
}


class TensorUnpickler(pickle.Unpickler):
    """Builds tensors over shared memory or CUDA IPC handles, dtypes, shapes and name spaces; refuses anything else."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if global_name in ALLOWED_CLASSES.get(module_name, ()):
            return super().find_class(module_name, global_name)
        if module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype):
            return getattr(torch, global_name)
        if (module_name, global_name) == ("torch.multiprocessing.reductions", "rebuild_storage_fd"):
            raise EngineError(
                "tensors are shared by file descriptor, which works between parent and child only; the sender must "
                'call torch.multiprocessing.set_sharing_strategy("file_system")'
            )
        raise EngineError(f"a weight payload may not contain {module_name}.{global_name}")


def read_payload(payloads: Sequence[str], load_format: str | None) -> NamedTensors:
    """Tensors of an `/update_weights_from_tensor` body, as views of the sender's memory: copy before answering."""
    if len(payloads) != 1:
        raise EngineError(f"{len(payloads)} payloads for an engine of one rank; send one")
    try:
        content = TensorUnpickler(io.BytesIO(base64.b64decode(payloads[0], validate=True))).load()
    except (binascii.Error, pickle.UnpicklingError, EOFError, RuntimeError, AttributeError, TypeError) as error:
        if isinstance(error, EngineError):
            raise
        raise EngineError(f"cannot read the weight payload: {type(error).__name__}: {error}") from error
    match load_format:
        case "flattened_bucket":
            return _unflatten(content)
        case None | "direct":
            if not isinstance(content, list):
                raise EngineError(f"a payload without load_format is a list of (name, tensor), got {type(content)}")
            return [(name, tensor) for name, tensor in content]
        case _:
            raise EngineError(f"Unknown load_format={load_format}")


def _unflatten(content: object) -> NamedTensors:
    if not isinstance(content, dict) or not {"flattened_tensor", "metadata"} <= content.keys():
        raise EngineError("a flattened bucket is a dict of flattened_tensor and metadata")
    flat, metadata = content["flattened_tensor"], content["metadata"]
    if not isinstance(flat, Tensor) or flat.dtype != torch.uint8 or flat.dim() != 1:
        raise EngineError("flattened_tensor must be one row of uint8")
    return [(place.name, _view(flat, place)) for place in metadata]


def _view(flat: Tensor, place: SimpleNamespace) -> Tensor:
    data = flat[place.start_idx : place.end_idx]
    if place.start_idx % place.dtype.itemsize:
        data = data.clone()  # a view of another dtype needs an aligned start
    return data.view(place.dtype).view(place.shape)


def receive(
    *,
    names: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[Sequence[int]],
    load_format: str | None,
    group: dist.ProcessGroup,
    device: torch.device,
) -> NamedTensors:
    """Tensors that rank 0 of the group broadcasts: one after the other, or all as one uint8 row. Collective."""
    specs = [
        (name, torch_dtype(text), torch.Size(shape)) for name, text, shape in zip(names, dtypes, shapes, strict=True)
    ]
    try:
        return _receive(specs, load_format=load_format, group=group, device=device)
    except RuntimeError as error:  # what torch raises when a member dies or times out
        raise EngineError(f"the broadcast failed, discard all weights: {error}") from error


def _receive(
    specs: Sequence[tuple[str, torch.dtype, torch.Size]],
    *,
    load_format: str | None,
    group: dist.ProcessGroup,
    device: torch.device,
) -> NamedTensors:
    if load_format != FLATTENED_BUCKET:
        tensors = [(name, torch.empty(shape, dtype=dtype, device=device)) for name, dtype, shape in specs]
        for _, tensor in tensors:
            dist.broadcast(tensor, src=0, group=group)
        return tensors
    sizes = [shape.numel() * dtype.itemsize for _, dtype, shape in specs]
    flat = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    dist.broadcast(flat, src=0, group=group)
    places: list[SimpleNamespace] = []
    start = 0
    for (name, dtype, shape), size in zip(specs, sizes, strict=True):
        places.append(SimpleNamespace(name=name, dtype=dtype, shape=shape, start_idx=start, end_idx=start + size))
        start += size
    return [(place.name, _view(flat, place)) for place in places]


def torch_dtype(text: str) -> torch.dtype:
    dtype = getattr(torch, text.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise EngineError(f"{text!r} is not a dtype")
    return dtype
