"""Lets Megatron-Core run in a process without CUDA. Called by `parallel.py` on a CPU rank, before any model is built.

Megatron asks torch.cuda for "the device", waits for it, and draws dropout from its generators. On a CPU rank the device
is the CPU, there is nothing to wait for, and dropout is off. What is replaced is replaced for the whole process, which
holds one training rank and nothing else.
"""

from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor


def run_megatron_on_cpu() -> None:
    """Calling it again changes nothing."""
    torch.cuda.current_device = _cpu  # pyright: ignore[reportAttributeAccessIssue]
    torch.cuda.synchronize = _nothing
    torch.cuda.current_stream = _CpuStream.only  # pyright: ignore[reportAttributeAccessIssue]
    torch.cuda.stream = _one_by_one  # pyright: ignore[reportAttributeAccessIssue]
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = _CpuStream.only()  # pyright: ignore[reportAttributeAccessIssue]
    token_dispatcher.maybe_move_tensor_to_cpu = _on_host
    Tensor.cuda = _itself  # pyright: ignore[reportAttributeAccessIssue]
    schedules.torch = _TorchOnCpu("torch")  # pyright: ignore[reportAttributeAccessIssue]
    param_and_grad_buffer._coalescing_manager = _one_by_one  # gloo has no coalescing
    # a tracker that draws nothing: `fork` is asked for under sequence parallelism, dropout or not
    megatron_random.initialize_rng_tracker(inference_rng_tracker=True)
    megatron_random._get_cuda_rng_state = _no_state
    megatron_random._set_cuda_rng_state = _nothing


def _cpu() -> torch.device:
    return torch.device("cpu")


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _itself(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return tensor


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """What Megatron's own does with a CUDA tensor; it leaves others as tensors, which all-to-all refuses as sizes."""
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


def _no_state(*args: Any, **kwargs: Any) -> Tensor:
    return torch.zeros(0, dtype=torch.uint8)


def _one_by_one(*args: Any, **kwargs: Any) -> Any:
    return nullcontext()


class _CpuStream:
    """Everything asked of it is done already."""

    _instance: "_CpuStream | None" = None

    @classmethod
    def only(cls, *args: Any) -> "_CpuStream":
        cls._instance = cls._instance or cls()
        return cls._instance

    def synchronize(self) -> None:
        return None

    def record_event(self) -> "_CpuStream":
        return self

    def wait_event(self, event: Any) -> None:
        return None


class _TorchOnCpu(ModuleType):
    """torch for a module that writes `device="cuda"`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*size: Any, device: Any = None, **options: Any) -> Tensor:
        return torch.zeros(*size, **options)
