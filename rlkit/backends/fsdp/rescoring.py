"""Scores given tokens with a plain transformers model on the CPU, one sequence at a time, under chosen conditions.

The slow, obvious way: no packing, no sharding, no kernels of ours. `rlkit explain` compares its numbers with what the
trainer and the engine said.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from rlkit.backends.fsdp.stored import stored_tensors
from rlkit.types.errors import CheckpointError


@dataclass(frozen=True, kw_only=True, slots=True)
class Scoring:
    """The conditions of one score; the defaults are the trainer's in float32."""

    temperature: float = 1.0
    top_p: float = 1.0
    """Below 1: log-probs inside the nucleus of this mass."""
    top_k: int = -1
    """Above 0: log-probs inside the k likeliest tokens."""
    dtype: torch.dtype = torch.float32
    num_padding: int = 0
    """Padding tokens in front that are attended to, as they should not be."""
    expert_change: int = 0
    """Experts more (or less) than the model's own number that each token is routed to."""
    router_dtype: torch.dtype | None = None
    """Precision of the router alone."""


class Rescorer:
    """A model whose weights can be replaced by those of a checkpoint."""

    def __init__(self, hf_checkpoint: Path, *, trust_remote_code: bool = False) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            hf_checkpoint,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            attn_implementation="eager",
        )
        self._model.eval().requires_grad_(False)
        self._first = {name: value.clone() for name, value in self._model.state_dict().items()}
        self._dtype = torch.float32
        self._masters: dict[str, Tensor] = dict(self._first)

    @property
    def has_experts(self) -> bool:
        return self._expert_config() is not None

    def load_first(self) -> None:
        """The weights of `--hf-checkpoint`."""
        self._load(self._first)

    def load_checkpoint(self, trainer_directory: Path) -> None:
        """The weights of a checkpoint of the trainer. CheckpointError when it holds those of another model."""
        prefix = "model."
        found = {name.removeprefix(prefix): tensor for name, tensor in stored_tensors(trainer_directory, prefix)}
        if not found.keys() & self._first.keys():
            raise CheckpointError(f"{trainer_directory} holds no weights under the names of this model")
        self._load(self._first | {name: value for name, value in found.items() if name in self._first})

    def distance(self) -> float:
        """Largest difference between the weights now and those of `--hf-checkpoint`."""
        return max(float((self._masters[name] - value).abs().max()) for name, value in self._first.items())

    @torch.no_grad()
    def score(self, tokens: Sequence[int], num_prompt: int, how: Scoring, *, padding_id: int = 0) -> list[float]:
        """Log-prob of every token from `num_prompt` on."""
        self._cast(how.dtype)
        ids = [padding_id] * how.num_padding + list(tokens)
        start = num_prompt + how.num_padding
        with self._routed(how):
            logits_TV = self._model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        scaled_NV = logits_TV[start - 1 : -1].float() / how.temperature
        logp_NV = _renormalised(scaled_NV.log_softmax(-1), how.top_p, how.top_k)
        return logp_NV.gather(1, torch.tensor(ids[start:])[:, None]).squeeze(1).tolist()

    def _load(self, values: Mapping[str, Tensor]) -> None:
        self._masters = {name: value.float() for name, value in values.items()}
        self._dtype = torch.float32
        self._model.float()
        self._model.load_state_dict(self._masters, strict=True)

    def _cast(self, dtype: torch.dtype) -> None:
        if dtype == self._dtype:
            return
        self._model.float()
        self._model.load_state_dict(self._masters, strict=True)
        self._model.to(dtype)
        self._dtype = dtype

    def _expert_config(self) -> Any:
        config = self._model.config.get_text_config()
        return config if getattr(config, "num_experts_per_tok", None) else None

    @contextmanager
    def _routed(self, how: Scoring) -> Iterator[None]:
        routers: list[Any] = [
            module for module in self._model.modules() if hasattr(module, "top_k") and _is_router(module)
        ]
        before = [module.top_k for module in routers]
        hooks = []
        for module in routers:
            module.top_k = max(1, int(module.top_k) + how.expert_change)
            if how.router_dtype is not None:
                hooks.append(module.register_forward_pre_hook(_rounded_input(how.router_dtype)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for module, top_k in zip(routers, before, strict=True):
                module.top_k = top_k


def _is_router(module: nn.Module) -> bool:
    return "router" in type(module).__name__.lower() or "gate" in type(module).__name__.lower()


def _rounded_input(dtype: torch.dtype) -> Any:
    """Round what a router sees to another precision, and back."""

    def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            value.to(dtype).to(value.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
            for value in args
        )

    return hook


def _renormalised(logp_NV: Tensor, top_p: float, top_k: int) -> Tensor:
    """Log-probs inside the nucleus; a token outside it keeps its own, as it cannot have been sampled there."""
    if top_p >= 1.0 and top_k <= 0:
        return logp_NV
    sorted_NV, order_NV = logp_NV.sort(dim=-1, descending=True)
    keep_NV = torch.ones_like(sorted_NV, dtype=torch.bool)
    if top_k > 0:
        keep_NV[:, top_k:] = False
    if top_p < 1.0:
        mass_NV = sorted_NV.exp().masked_fill(~keep_NV, 0.0)
        mass_NV = mass_NV / mass_NV.sum(-1, keepdim=True)
        keep_NV &= mass_NV.cumsum(-1) - mass_NV < top_p
    total_N = sorted_NV.masked_fill(~keep_NV, float("-inf")).logsumexp(-1, keepdim=True)
    kept_NV = torch.zeros_like(keep_NV).scatter(1, order_NV, keep_NV)
    return torch.where(kept_NV, logp_NV - total_N, logp_NV)
