"""Low-rank adapters on the policy (Hu et al., 2021), by peft's layers. Called by `model.py`, `weights.py` and
`backend.py`.

An adapted linear layer computes W x + s B A x with s = lora_alpha / lora_rank, A [r, in], B [out, r]. Only A and B are
trained; B starts at zero. Engines get the product merged: W + s B A.

Names: a parameter is called as in the checkpoint of the base model, an adapter as in peft's adapter checkpoints,
`model.layers.0.mlp.up_proj.lora_A.weight`.
"""

import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlkit.config.schema import LoraConfig
from rlkit.types.errors import ConfigError

ADAPTER = "default"
"""peft's name of a lone adapter."""
FACTORS = ("lora_A", "lora_B")


def plain_name(name: str) -> str:
    """peft's name of a parameter inside the adapted model -> its name in checkpoints."""
    for factor in FACTORS:
        name = name.replace(f".{factor}.{ADAPTER}.", f".{factor}.")
    return name.replace(".base_layer.", ".")


def is_adapter(name: str) -> bool:
    """Whether a name (plain or peft's) is that of a factor."""
    return any(f".{factor}." in name for factor in FACTORS)


def factor_names(weight: str) -> tuple[str, str]:
    """Plain names of A and B of the matrix `weight`."""
    layer = weight.removesuffix(".weight")
    return f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"


def add_adapters(model: PreTrainedModel, cfg: LoraConfig, *, dtype_of: Callable[[str], torch.dtype]) -> None:
    """Put adapters into a model on the meta device and freeze everything else.

    The base is kept in `dtype_of` its plain name: what nobody trains needs no float32 copy. ConfigError where a name in
    `--lora-target-modules` finds no linear layer.
    """
    from peft import inject_adapter_in_model  # local: only where adapters are asked for

    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(dtype_of(name))
    _check_targets(model, cfg)
    inject_adapter_in_model(_peft_config(cfg), model, low_cpu_mem_usage=True)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            parameter.data = parameter.data.float()
            parameter.requires_grad_(True)


def _peft_config(cfg: LoraConfig, base: Path | None = None) -> Any:
    from peft import LoraConfig as PeftConfig  # local: only where adapters are asked for

    targets = cfg.lora_target_modules
    return PeftConfig(
        r=cfg.lora_rank,
        lora_alpha=cfg.lora_alpha,  # pyright: ignore[reportArgumentType]  (an int in peft's annotation alone)
        lora_dropout=cfg.lora_dropout,
        target_modules=targets[0] if targets == ("all-linear",) else list(targets),
        task_type="CAUSAL_LM",
        base_model_name_or_path=None if base is None else str(base),
        inference_mode=base is not None,
    )


def adapter_files(directory: Path, factors: Mapping[str, Tensor], cfg: LoraConfig, base: Path) -> None:
    """A folder that `peft.PeftModel.from_pretrained` reads on top of the base model in `base`. `factors`: whole, by
    plain name.
    """
    directory.mkdir(parents=True, exist_ok=True)
    named = {f"base_model.model.{name}": factor.contiguous() for name, factor in factors.items()}
    save_file(named, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    _peft_config(cfg, base).save_pretrained(str(directory))
    path = directory / "adapter_config.json"
    options = json.loads(path.read_text())
    if isinstance(options["target_modules"], list):
        options["target_modules"].sort()  # a set in peft, in the order of this process's hashes
    path.write_text(json.dumps(options, indent=2, sort_keys=True))


def lora_scaling(cfg: LoraConfig) -> float:
    """s; 0 without adapters."""
    return cfg.lora_alpha / cfg.lora_rank if cfg.lora_rank > 0 else 0.0


def _check_targets(model: PreTrainedModel, cfg: LoraConfig) -> None:
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for target in cfg.lora_target_modules:
        if target != "all-linear" and not any(name == target or name.endswith(f".{target}") for name in linear):
            known = sorted({name.rpartition(".")[2] for name in linear} - {"lm_head"})
            raise ConfigError(
                f"--lora-target-modules {target}: this model has no linear layer of that name; it has "
                f"{', '.join(known)}"
            )


def initial_factor(name: str, shape: Sequence[int], seed: int) -> Tensor:
    """A factor's first values, float32 on the CPU: A uniform in +-1 / sqrt(in), B zero.

    They depend on the seed and the plain name alone, not on who asks: every rank cuts its rows from the same matrix.
    """
    if ".lora_B." in name:
        return torch.zeros(*shape)
    generator = torch.Generator().manual_seed((seed << 32) ^ zlib.crc32(name.encode()))
    bound = 1.0 / math.sqrt(shape[1])
    return torch.empty(*shape).uniform_(-bound, bound, generator=generator)


def merged_rows(weight: Tensor, b_rows: Tensor, a: Tensor, scaling: float) -> Tensor:
    """W + s B A for some rows of W, in float32 (or W's dtype, if that is wider).

    The product is made in float64, so that the result does not depend on how many rows a rank holds.
    """
    delta = (b_rows.double() @ a.double()).mul_(scaling)
    wide = torch.promote_types(weight.dtype, torch.float32)
    return weight.to(wide) + delta.to(wide)


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """The base model, for scoring: adapters are passed over and nothing is moved or copied.

    peft's own switch also turns off the factors' `requires_grad`, which FSDP2 must not see change.
    """
    layers = _adapted_layers(model)
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Scoring sees all of the adapters."""
    drops = [module for layer in _adapted_layers(model) for module in layer.lora_dropout.values() if module.training]
    try:
        for module in drops:
            module.eval()
        yield
    finally:
        for module in drops:
            module.train()


def _adapted_layers(model: nn.Module) -> list:
    return [module for module in model.modules() if hasattr(module, "lora_A")]
