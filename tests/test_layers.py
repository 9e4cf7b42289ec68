"""The layer table of docs/CONTRIBUTING.md, checked from the AST: who may import whom, and which library lives where."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "rlkit"

RANK = {
    "config": 0,
    "types": 1,
    "observability": 1,
    "algo": 2,
    "data": 2,
    "rewards": 2,
    "dist": 2,
    "backends": 3,
    "engines": 3,
    "sync": 4,
    "rollout": 4,
    "orchestration": 5,
    "cli": 6,
}
ONLY_IN = {
    "ray": ("orchestration",),
    "megatron": ("backends/megatron",),
    "sglang": ("engines/sglang",),
    "transformers": ("backends/fsdp", "engines/embedded", "data/tokenizer"),
    "torch.distributed": ("dist", "backends", "sync", "engines/embedded"),
    "aiohttp": ("engines", "rollout", "rewards/remote"),
    "fastapi": ("engines/embedded",),
    "math_verify": ("rewards",),
    "tyro": ("config",),
    "wandb": ("observability",),
    "tensorboard": ("observability",),
    "mlflow": ("observability",),
    "rich": ("observability", "cli"),
    "matplotlib": ("observability",),
}
NEVER = {"config": ("torch", "numpy"), "rewards": ("torch",)}
BASE_ONLY = {
    "backends": {"backends.base", "backends.out_of_memory"},
    "engines": {"engines.base", "engines.client", "engines.access"},
}
"""Of layer 3, the layers above see these modules only."""
SHARED = {"attention"}
"""Folders of layer 3 that their siblings may import."""


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE)


def imported_names(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_within(name: str, prefix: str) -> bool:
    return f"{name}.".startswith(f"{prefix}.")


def violations(module: str, source: str) -> list[str]:
    """`module` is the path below the package without suffix, e.g. `backends/fsdp/model`."""
    owner = module.split("/")[0]
    found = []
    for name in imported_names(source):
        for library, homes in ONLY_IN.items():
            if is_within(name, library) and not any(f"{module}/".startswith(f"{home}/") for home in homes):
                found.append(f"{module} imports {library}")
        found += [f"{module} imports {library}" for library in NEVER.get(owner, ()) if is_within(name, library)]
        if not is_within(name, "rlkit") or name == "rlkit":
            continue
        inner = name.removeprefix("rlkit.")
        target = inner.split(".")[0]
        if target != owner and RANK[target] >= RANK[owner]:
            found.append(f"{module} imports rlkit.{target}")
        sees_base_only = RANK[owner] > 3 and target in BASE_ONLY and owner != "cli"
        if sees_base_only and not any(is_within(inner, base) for base in BASE_ONLY[target]):
            found.append(f"{module} imports rlkit.{inner}")
        if target == owner and owner in BASE_ONLY and "/" in module.removeprefix(f"{owner}/"):
            sibling, mine = inner.split(".")[1], module.split("/")[1]
            if sibling not in (mine, *SHARED) and (PACKAGE / owner / sibling).is_dir():
                found.append(f"{module} imports rlkit.{inner}")
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_module_keeps_to_its_layer(path):
    assert violations(str(path.relative_to(PACKAGE).with_suffix("")), path.read_text()) == []


@pytest.mark.parametrize(
    "module, source, expected",
    [
        ("algo/losses", "import ray", "algo/losses imports ray"),
        ("config/load", "from torch import nn", "config/load imports torch"),
        ("types/samples", "from rlkit.data.prompts import PromptSource", "types/samples imports rlkit.data"),
        ("data/prompts", "from rlkit.algo.packing import plan_step", "data/prompts imports rlkit.algo"),
        (
            "rollout/manager",
            "import rlkit.engines.embedded.server",
            "rollout/manager imports rlkit.engines.embedded.server",
        ),
        (
            "backends/fsdp/model",
            "from rlkit.backends.megatron import x",
            "backends/fsdp/model imports rlkit.backends.megatron.x",
        ),
        (
            "engines/embedded/server",
            "from rlkit.engines.sglang.launch import f",
            "engines/embedded/server imports rlkit.engines.sglang.launch.f",
        ),
        ("algo/losses", "import torch", None),
        ("engines/embedded/server", "import torch.distributed", None),
    ],
)
def test_the_checker_sees(module, source, expected):
    assert violations(module, source) == ([expected] if expected else [])


def test_every_folder_has_a_rank():
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == set(RANK)


MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 100


@pytest.mark.parametrize("path", [*modules(), ROOT / "train.py"], ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_small(path):
    source = path.read_text()
    assert source.count("\n") <= MAX_FILE_LINES
    long = [
        f"{node.name} has {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.lineno >= MAX_FUNCTION_LINES
    ]
    assert long == []


def test_nobody_imports_the_entry_points():
    for path in modules():
        names = list(imported_names(path.read_text()))
        assert not [name for name in names if name.split(".")[0] in ("train", "train_async", "tools")], path
