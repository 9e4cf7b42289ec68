"""The benchmark of memory estimates reads what `--probe` prints, and fails where an estimate is off."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from rlkit.cli.probe import Measured, print_table
from rlkit.config.schema import RunConfig

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "bench"))
    spec = importlib.util.spec_from_file_location("gpu_memory", ROOT / "tools" / "bench" / "gpu_memory.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rows_of_a_probe_are_read(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    gib = 1024**3
    rows = [
        Measured(phase="train", predicted=30 * gib, measured=24 * gib),
        Measured(phase="sync", predicted=2 * gib, measured=2 * gib),
    ]
    print_table(RunConfig(), rows, "cuda")
    printed = capsys.readouterr().out
    monkeypatch.setattr(
        subprocess, "run", lambda *args, **kwargs: subprocess.CompletedProcess(args, 0, stdout=printed, stderr="")
    )
    read = tool.probe("W1", [], 1.0)
    assert [(row["what"], row["predicted"], row["measured"]) for row in read] == [
        ("trainer, train", 30.0, 24.0),
        ("trainer, sync", 2.0, 2.0),
    ]
    tool.print_rows(read)
    table = capsys.readouterr().out
    assert "+25.0%  above 10 %" in table and table.count("above 10 %") == 1


def test_a_probe_that_fails_is_a_row_with_its_last_words(tool: ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        subprocess,
        "run",
        lambda *args, **kwargs: subprocess.CompletedProcess(args, 1, stdout="", stderr="out of memory"),
    )
    (row,) = tool.probe("W3", [], 1.0)
    assert row["failed"] == "out of memory"


def test_it_names_its_options():
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "bench" / "gpu_memory.py"), "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )
    assert "--loop" in done.stdout
