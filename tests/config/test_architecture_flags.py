"""Flags that describe the model are compared with config.json; `scripts/models/*.sh` with shipped files."""

import importlib.metadata
import json
import shlex
import subprocess
from pathlib import Path

import pytest

from rlkit.config.fields import all_fields
from rlkit.config.rules.architecture import NAMES, model_is_the_one_described
from rlkit.config.rules.megatron import megatron_has_its_packages
from rlkit.config.schema import ArchitectureConfig, ModelConfig, RunConfig, TrainConfig

MODELS = Path(__file__).parents[2] / "scripts" / "models"
FILES = sorted(MODELS.glob("*.sh"))
SHIPPED = {"qwen3-30B-A3B": "Qwen3-30B-A3B", "deepseek-r1": "DeepSeek-R1"}
CONFIG = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 1e4}


def described(folder: Path, **flags: object) -> list[str]:
    architecture = ArchitectureConfig(**flags)  # pyright: ignore[reportArgumentType]
    return model_is_the_one_described(
        RunConfig(model=ModelConfig(hf_checkpoint=str(folder)), architecture=architecture)
    )


def arguments_of(file: Path) -> dict[str, object]:
    """The flags of a `scripts/models/*.sh`, as bash reads them."""
    told = subprocess.run(
        ["bash", "-c", f'source {shlex.quote(str(file))}; printf "%s\\n" "${{MODEL_ARGS[@]}}"'],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    names = [flag.removeprefix("--").replace("-", "_") for flag in told[::2]]
    kinds = {name: all_fields()[name].inner for name in names}
    return {name: kinds[name](value) for name, value in zip(names, told[1::2], strict=True)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"num_layers": 2, "hidden_size": 64, "kv_channels": 16, "num_query_groups": 4},
        {"rotary_base": 1e4, "norm_epsilon": 1e-6},
    ],
)
def test_flags_that_agree_are_accepted(folder, flags):
    assert described(folder, **flags) == []


def test_all_differences_are_told_at_once(folder):
    (message,) = described(folder, num_layers=3, num_experts=8, rotary_base=5e5, hidden_size=64)
    assert "--num-layers 3, but config.json says num_hidden_layers = 2" in message
    assert "--num-experts 8, but config.json has no such setting" in message
    assert "--rotary-base 500000.0, but config.json says rope_theta = 10000.0" in message
    assert "--hidden-size" not in message


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_model_files_hold_flags_of_the_schema(file):
    arguments = arguments_of(file)
    assert arguments.keys() <= NAMES.keys() | {"rotary_base"}
    assert {"num_layers", "hidden_size", "vocab_size"} <= arguments.keys()


@pytest.mark.parametrize("name", SHIPPED)
def test_model_files_agree_with_the_shipped_configurations(name):
    assert described(MODELS / SHIPPED[name], **arguments_of(MODELS / f"{name}.sh")) == []


def test_megatron_without_its_packages_is_told_before_a_launch(monkeypatch):
    cfg = RunConfig(train=TrainConfig(train_backend="megatron"))

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert ["pip install 'rlkit[megatron]'" in message for message in megatron_has_its_packages(cfg)] == [True]
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.16.1")
    assert any("not 0.16.1" in message for message in megatron_has_its_packages(cfg))
    assert megatron_has_its_packages(RunConfig()) == []
