"""The converter writes what `--save-hf` wrote, bit for bit, from shards, from one file, and from adapters."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "backends"))

from fsdp_setup import (  # noqa: E402
    make_config,
    save_checkpoint_dir,
    spread_out,
    start_backend,
    tiny_llama,
    tiny_qwen3,
    train_step,
)

from rlkit.dist.groups import destroy_process_group  # noqa: E402

CASES = {
    "tied, sharded": ("qwen3", {}),
    "untied, one file": ("llama", {"fsdp_full_params": True}),
    "half precision": ("half", {}),
    "adapters": ("qwen3", {"lora_rank": 4, "lora_target_modules": ("q_proj", "down_proj")}),
    "adapters on half precision": ("half", {"lora_rank": 2, "fsdp_full_params": True}),
}


def make_source(kind: str, path: Path) -> Path:
    import torch

    model = spread_out(tiny_llama() if kind == "llama" else tiny_qwen3())
    return save_checkpoint_dir(model.to(torch.bfloat16) if kind == "half" else model, path)


def run_tool(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "convert_fsdp_to_hf.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT), "PATH": ""})


@pytest.mark.parametrize("case", CASES)
def test_every_file_is_that_of_the_export(tmp_path: Path, case: str):
    kind, changes = CASES[case]
    source = make_source(kind, tmp_path / "source")
    cfg = make_config(source, **changes)
    backend = start_backend(cfg)
    for step in range(2):
        train_step(backend, cfg, step)
    backend.save(1, tmp_path / "iter" / "trainer", hf_directory=tmp_path / "expected")
    destroy_process_group()
    done = run_tool("--input-dir", tmp_path / "iter", "--output-dir", tmp_path / "found", "--origin-hf-dir", source)
    assert done.returncode == 0, done.stderr
    expected = {path.relative_to(tmp_path / "expected") for path in (tmp_path / "expected").rglob("*")}
    assert {path.relative_to(tmp_path / "found") for path in (tmp_path / "found").rglob("*")} == expected
    assert any(path.name == "adapter_model.safetensors" for path in expected) == ("adapters" in case)
    for path in expected:
        if (tmp_path / "expected" / path).is_file():
            assert (tmp_path / "expected" / path).read_bytes() == (tmp_path / "found" / path).read_bytes(), path


@pytest.mark.slow
def test_what_is_in_the_way_is_an_error(tmp_path: Path):
    source = make_source("qwen3", tmp_path / "source")
    cfg = make_config(source)
    start_backend(cfg).save(1, tmp_path / "iter" / "trainer", hf_directory=None)
    destroy_process_group()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    flags = ("--input-dir", tmp_path / "iter", "--origin-hf-dir", source)
    refused = run_tool(*flags, "--output-dir", tmp_path / "full")
    assert refused.returncode == 1 and "is not empty; pass --force" in refused.stderr
    assert run_tool(*flags, "--output-dir", tmp_path / "full", "--force").returncode == 0
    for place in (source, tmp_path / "iter"):
        refused = run_tool(*flags, "--output-dir", place, "--force")
        assert refused.returncode == 1 and "refusing to write over" in refused.stderr
    other = make_source("llama", tmp_path / "other")
    wrong = run_tool("--input-dir", tmp_path / "iter", "--origin-hf-dir", other, "--output-dir", tmp_path / "wrong")
    assert wrong.returncode == 1 and ("holds no tensor" in wrong.stderr or "belong together" in wrong.stderr)
    assert not (tmp_path / "wrong" / "config.json").exists()
    empty = run_tool("--input-dir", tmp_path, "--origin-hf-dir", source, "--output-dir", tmp_path / "none")
    assert empty.returncode == 1 and "holds no checkpoint" in empty.stderr
