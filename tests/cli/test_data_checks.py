"""Prompt files are looked at before anything starts."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlkit.cli.entry import prepare_run
from rlkit.config.errors import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data_checks") / "tiny"
    tool = ROOT / "tools" / "make_tiny_model.py"
    subprocess.run([sys.executable, str(tool), "--output", str(folder), "--untrained"], check=True, capture_output=True)
    return folder


def argv(model: Path, rows: Path, *more: str) -> list[str]:
    words = f"--hf-checkpoint {model} --prompt-data {rows} --label-key label --rm-type exact --colocate"
    return [*words.split(), "--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--device", "cpu", *more]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Twelve short prompts and four long ones; a character is a token."""
    path = tmp_path / "train.jsonl"
    texts = [*("1+2=" for _ in range(12)), *("1+2=" * 10 for _ in range(4))]
    path.write_text("".join(json.dumps({"input": text, "label": "3"}) + "\n" for text in texts))
    return path


def test_epochs_count_the_rows_that_are_trained_on(model: Path, rows: Path):
    assert prepare_run(argv(model, rows, "--num-epoch", "2")).num_steps == 8
    limited = argv(model, rows, "--num-epoch", "2", "--rollout-max-prompt-len", "20")
    assert prepare_run(limited).num_steps == 2 * 12 // 4


def test_epochs_without_a_row_that_fits(model: Path, rows: Path):
    with pytest.raises(ConfigError, match=r"over 0 rows of .* that fit --rollout-max-prompt-len 1"):
        prepare_run(argv(model, rows, "--num-epoch", "2", "--rollout-max-prompt-len", "1"))


@pytest.mark.parametrize("cut", ["@[100:]", "@[5:5]", "@[16:20]"])
def test_an_empty_slice_is_an_error_at_the_start(model: Path, rows: Path, cut: str):
    with pytest.raises(ConfigError, match=r"prompt_data = .* holds no row; its file has 16: correct --prompt-data"):
        prepare_run(argv(model, Path(f"{rows}{cut}"), "--num-rollout", "1"))


def test_an_empty_evaluation_set_is_an_error_at_the_start(model: Path, rows: Path):
    more = ("--num-rollout", "1", "--eval-interval", "1", "--eval-prompt-data", "held", f"{rows}@[50:60]")
    with pytest.raises(ConfigError, match=r"eval_prompt_data = .* holds no row"):
        prepare_run(argv(model, rows, *more))


def test_an_empty_file_is_an_error_at_the_start(model: Path, tmp_path: Path):
    path = tmp_path / "nothing.jsonl"
    path.write_text("\n\n")
    with pytest.raises(ConfigError, match="its file is empty"):
        prepare_run(argv(model, path, "--num-rollout", "1"))


def test_a_parquet_file_is_launched(model: Path, tmp_path: Path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "p.parquet"
    parquet.write_table(pyarrow.table({"input": ["1+2="] * 8, "label": ["3"] * 8}), path)
    assert prepare_run(argv(model, path, "--num-epoch", "2")).num_steps == 4
    with pytest.raises(ConfigError, match="holds no row; its file has 8"):
        prepare_run(argv(model, Path(f"{path}@[8:]"), "--num-rollout", "1"))


def lfs_pointer(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 1\n")


WEIGHTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "pointer": (lfs_pointer, "is a Git LFS pointer"),
    "cut in the data": (lambda path: os.truncate(path, path.stat().st_size - 100), "was cut off"),
    "cut in the header": (lambda path: os.truncate(path, 100), "was cut off"),
    "cut in the length": (lambda path: os.truncate(path, 5), "was cut off"),
    "empty": (lambda path: os.truncate(path, 0), "is empty"),
    "another file": (lambda path: path.write_bytes(b"<!doctype html><html>"), "is no safetensors file"),
}


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("more", [(), ("--dry-run",)], ids=["launch", "dry-run"])
def test_weights_that_are_none_are_named(model: Path, rows: Path, tmp_path: Path, name: str, more: tuple[str, ...]):
    copy = Path(shutil.copytree(model, tmp_path / "model"))
    break_it, said = WEIGHTS[name]
    (path,) = copy.glob("*.safetensors")
    break_it(path)
    with pytest.raises(ConfigError, match=f"{path} {said}"):
        prepare_run(argv(copy, rows, "--num-rollout", "1", *more))


@pytest.mark.parametrize("text", ["[]", "{", "{}", '{"model_type": "qwen3", "vocab_size": "x"}'])
@pytest.mark.parametrize("more", [(), ("--dry-run",)], ids=["launch", "dry-run"])
def test_a_config_json_that_is_none_is_named(model: Path, rows: Path, tmp_path: Path, text: str, more: tuple[str, ...]):
    copy = Path(shutil.copytree(model, tmp_path / "model"))
    (copy / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=str(copy / "config.json")):
        prepare_run(argv(copy, rows, "--num-rollout", "1", *more))


def test_home_is_found_without_a_shell(model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert prepare_run(argv(model, rows, "--num-rollout", "1", "--output-dir=~/r")).run_dir == tmp_path / "r"


def test_a_reader_of_the_dry_run_may_leave(model: Path, rows: Path):
    words = [sys.executable, str(ROOT / "train.py"), *argv(model, rows, "--num-rollout", "1", "--dry-run")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        assert program.stdout is not None and program.stderr is not None
        program.stdout.close()
        said = program.stderr.read()
    assert (program.returncode, said) == (0, b"")
