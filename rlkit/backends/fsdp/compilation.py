"""torch.compile, a block at a time. Called by `backend.py` and `model.py`.

Blocks of a kind run the same code, so they share one compiled graph: 28 layers cost one compilation, and so does the
next pack, because its length is a symbol. FSDP2's hooks stay outside: they surround the call of a block's `forward`,
which is what is compiled. Attention is an opaque operator inside (`attention_op.py`).
"""

import os
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch._dynamo.utils import counters

CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
"""Environment variable -> folder below `cache_root`."""


def is_compiled(torch_compile: Literal["auto", "on", "off"], device: torch.device) -> bool:
    """Whether `--torch-compile` means it on this device."""
    return torch_compile == "on" or (torch_compile == "auto" and device.type == "cuda")


def cache_root() -> Path:
    """`$XDG_CACHE_HOME/rlkit`, else `~/.cache/rlkit`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlkit"


def keep_compiled_code(environment: MutableMapping[str, str]) -> None:
    """Let compiled code outlive the process and the machine's /tmp, unless the user has chosen a place."""
    for variable, folder in CACHES.items():
        environment.setdefault(variable, str(cache_root() / folder))


def compile_blocks(blocks: Sequence[nn.Module]) -> None:
    """Compile the `forward` of every block, before or after `fully_shard`. Nothing is compiled until the first call."""
    for block in blocks:
        block.forward = torch.compile(block.forward, dynamic=True)


def num_compiled_graphs() -> int:
    """Graphs that this process has compiled so far; rises where something had to be compiled anew."""
    return int(counters["stats"]["unique_graphs"])
