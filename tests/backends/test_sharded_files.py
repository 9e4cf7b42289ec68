"""A checkpoint folder from somebody else runs nothing when it is read; and nothing in rlkit unpickles at will."""

import ast
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from rlkit.backends.sharded_files import ShardedFiles
from rlkit.types.errors import CheckpointError

ROOT = Path(__file__).parents[2]
TENSORS = {
    "model.a": torch.arange(12, dtype=torch.float32).view(3, 4),
    "model.b": torch.ones(2, dtype=torch.bfloat16),
    "step.a": torch.zeros(()),
}


def test_what_was_saved_is_read(tmp_path: Path):
    save(TENSORS, checkpoint_id=tmp_path, no_dist=True)
    read = {name: torch.empty_like(tensor) for name, tensor in TENSORS.items()}
    load(read, storage_reader=ShardedFiles(tmp_path), no_dist=True)
    for name, tensor in TENSORS.items():
        assert torch.equal(read[name], tensor), name


class Attack:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_an_index_that_wants_to_run_something_is_refused(tmp_path: Path):
    folder, mark = tmp_path / "checkpoint", tmp_path / "ran"
    save(TENSORS, checkpoint_id=folder, no_dist=True)
    (folder / ".metadata").write_bytes(pickle.dumps(Attack(mark)))
    with pytest.raises(CheckpointError, match="has no place in the index of a checkpoint"):
        ShardedFiles(folder).read_metadata()
    assert not mark.exists()
    pickle.loads(pickle.dumps(Attack(mark)))
    assert mark.exists(), "the attack itself works"


def test_a_damaged_index_is_an_error_with_its_path(tmp_path: Path):
    save(TENSORS, checkpoint_id=tmp_path, no_dist=True)
    path = tmp_path / ".metadata"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"\.metadata is not the index of a checkpoint"):
        ShardedFiles(tmp_path).read_metadata()


ALLOWED_PICKLES = {
    "rewards/wire.py": "pipes between a process and its own children",
}
"""Modules that load pickles of any class -> why nobody else can write them."""


def calls(tree: ast.AST, name: str) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == name]


def test_nothing_loads_pickles_or_foreign_code_unless_asked_for():
    """Every `torch.load` says `weights_only=True`, every `from_pretrained` leaves code of the checkpoint alone or
    passes the flag on, and sharded checkpoints are read through the class above.
    """
    for path in sorted((ROOT / "rlkit").rglob("*.py")):
        tree, where = ast.parse(path.read_text()), str(path.relative_to(ROOT / "rlkit"))
        for call in calls(tree, "torch.load"):
            given = {item.arg: ast.unparse(item.value) for item in call.keywords}
            assert given.get("weights_only") == "True", f"{where}:{call.lineno}"
        for name in ("pickle.load", "pickle.loads"):
            assert not calls(tree, name) or where in ALLOWED_PICKLES, f"{where} loads pickles"
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            if isinstance(call.func, ast.Attribute) and call.func.attr in ("from_pretrained", "from_config"):
                trust = [ast.unparse(item.value) for item in call.keywords if item.arg == "trust_remote_code"]
                assert "True" not in trust, f"{where}:{call.lineno} runs code of the checkpoint"
        if where != "backends/sharded_files.py":
            names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
            assert "FileSystemReader" not in names, f"{where} reads an index by pickle: use ShardedFiles"
            for call in calls(tree, "load"):
                assert not any(item.arg == "checkpoint_id" for item in call.keywords), f"{where}:{call.lineno}"
