"""The dry run's bars and remedies, and the probe beside them."""

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlkit.algo.memory_plan import GIB
from rlkit.cli import dry_run, dry_run_phases
from rlkit.cli.dry_run import print_dry_run
from rlkit.cli.machine import CudaDevice
from rlkit.cli.probe import longest_updates, predictions, run_probe
from rlkit.config.errors import ConfigError
from rlkit.config.load import load_config

ROOT = Path(__file__).parents[2]
CONFIG = {
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12_288,
    "vocab_size": 151_936,
    "tie_word_embeddings": False,
}
"""The shape of Qwen3-8B."""
Argv = Callable[..., list[str]]


@pytest.fixture
def argv(tmp_path: Path) -> Argv:
    def make(*more: str, **changed: Any) -> list[str]:
        (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **changed}))
        words = f"--hf-checkpoint {tmp_path} --prompt-data p.jsonl --label-key label --rm-type math --num-rollout 1"
        sizes = "--rollout-batch-size 32 --n-samples-per-prompt 8 --num-gpus-per-node 8"
        return [*words.split(), *sizes.split(), *more]

    return make


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch):
    for module in (dry_run, dry_run_phases):
        monkeypatch.setattr(module, "cuda_devices", list)


def printed(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "120")
    file = io.StringIO()
    print_dry_run(load_config(argv), file)
    return " ".join(file.getvalue().split())


@pytest.mark.usefixtures("no_gpu")
def test_each_phase_has_a_bar_against_the_gpu(argv: Argv, monkeypatch: pytest.MonkeyPatch):
    text = printed(argv("--colocate", "--gpu-type", "H200", "--host-memory-gib", "2000"), monkeypatch)
    assert "GPU of trainer and engine, 140.4 GiB generate |" in text
    assert "host, 2000.0 GiB generate |" in text
    for phase in ("generate", "log-prob", "train", "save", "sync"):
        assert f" {phase} |" in text
    assert "samples of full length" in text
    assert "DOES NOT FIT" not in text


ONE = ["--colocate", "--gpu-memory-gib", "79", "--actor-num-gpus-per-node", "1"]
EIGHT = ["--colocate", "--gpu-memory-gib", "79", "--actor-num-gpus-per-node", "8"]
PACKS = ["--max-tokens-per-gpu", "262144"]
TOO_MUCH: dict[str, tuple[list[str], str]] = {
    "activations that are kept": (
        [*EIGHT, "--max-tokens-per-gpu", "32768", "--no-gradient-checkpointing"],
        "drop --no-gradient-checkpointing$",
    ),
    "packs": ([*EIGHT, *PACKS], r"lower (--max-tokens-per-gpu) to (\d+)"),
    "states": (ONE, r"train on more GPUs: (--actor-num-nodes) (\d+) (--actor-num-gpus-per-node) (\d+)"),
    "both": (
        [*ONE, *PACKS],
        r"with smaller packs: (--actor-num-nodes) (\d+) (--actor-num-gpus-per-node) (\d+) (--max-tokens-per-gpu) (\d+)",
    ),
    "a sample": (
        [*EIGHT, "--rollout-max-context-len", "200000"],
        r"share samples: (--context-parallel-size) (\d+)",
    ),
}
"""What is too large -> flags, and a pattern of the remedy whose groups are the flags to add."""


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("name", TOO_MUCH)
def test_the_remedy_is_named_and_works(argv: Argv, monkeypatch: pytest.MonkeyPatch, name: str):
    flags, pattern = TOO_MUCH[name]
    text = printed(argv(*flags), monkeypatch)
    told = re.search("DOES NOT FIT: train needs .*? on the GPU of trainer and engine; (.*?) Notes", text)
    assert told is not None, text
    remedy = re.search(pattern, told[1])
    assert remedy is not None, told[1]
    followed = [flag for flag in flags if flag != "--no-gradient-checkpointing"]
    assert "DOES NOT FIT: train" not in printed(argv(*followed, *remedy.groups()), monkeypatch)


@pytest.mark.usefixtures("no_gpu")
def test_a_cache_that_is_too_small_for_one_sample(argv: Argv, monkeypatch: pytest.MonkeyPatch):
    text = printed(
        argv(
            *("--rollout-num-gpus", "1", "--gpu-memory-gib", "24", "--sglang-mem-fraction-static", "0.7"),
            *("--rollout-max-context-len", "40960"),
        ),
        monkeypatch,
    )
    assert "the KV cache of an engine" in text and "raise --rollout-num-gpus-per-engine" in text


@pytest.mark.usefixtures("no_gpu")
def test_a_host_that_is_too_small(argv: Argv, monkeypatch: pytest.MonkeyPatch):
    text = printed(argv("--colocate", "--gpu-type", "H200", "--host-memory-gib", "64", "--async-save"), monkeypatch)
    assert "on a host; drop --async-save" in text


@pytest.mark.usefixtures("no_gpu")
def test_an_unknown_architecture_is_not_guessed(argv: Argv, monkeypatch: pytest.MonkeyPatch):
    assert "not estimated: that needs the FSDP backend" in printed(argv("--colocate", num_experts=64), monkeypatch)


def test_gpus_that_this_machine_does_not_have_are_said(argv: Argv, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dry_run, "cuda_devices", list)
    text = printed(argv("--colocate"), monkeypatch)
    assert "GPU on 1 node (none here)" in text or "GPUs on 1 node (none here)" in text
    assert "pass --device cpu to plan that" in text
    for flags in (("--device", "cpu"), ("--gpu-type", "H200")):
        assert "(none here)" not in printed(argv("--colocate", *flags), monkeypatch)


def test_the_gpus_of_this_machine_are_the_capacity(argv: Argv, monkeypatch: pytest.MonkeyPatch):
    here = [CudaDevice(index=0, name="X", num_bytes=100 * GIB), CudaDevice(index=1, name="X", num_bytes=90 * GIB)]
    for module in (dry_run, dry_run_phases):
        monkeypatch.setattr(module, "cuda_devices", lambda: here)
    text = printed(argv("--colocate"), monkeypatch)
    assert "GPU of trainer and engine, 90.0 GiB" in text
    assert "(none here)" not in text


def test_probed_packs_are_as_long_as_they_may_be(argv: Argv):
    cfg = load_config(
        argv(
            "--colocate",
            "--max-tokens-per-gpu",
            "5000",
            "--actor-num-gpus-per-node",
            "4",
            "--context-parallel-size",
            "2",
        )
    ).config
    ranks = longest_updates(cfg)
    assert len(ranks) == cfg.data_parallel_size == 2
    for (update,) in ranks:
        assert [batch.num_tokens for batch in update.micro_batches] == [10_000, 10_000]


def test_a_probe_refuses_a_run_without_a_trainer(argv: Argv):
    words = argv("--colocate", "--device", "cpu", "--debug-rollout-only")
    with pytest.raises(ConfigError, match="drop --probe"):
        run_probe(words, load_config(words).config)


def test_a_probe_refuses_gpus_that_are_not_there(argv: Argv, monkeypatch: pytest.MonkeyPatch):
    words = argv("--colocate", "--device", "cuda", "--actor-num-gpus-per-node", "4")
    with pytest.raises(ConfigError, match=r"all 4 training ranks on this machine, which has \d GPUs"):
        run_probe(words, load_config(words).config)


def test_predictions_leave_out_what_the_probe_cannot_see(argv: Argv):
    cfg = load_config(argv("--colocate", "--gpu-type", "H200")).config
    on_gpu = predictions(cfg, "cuda")
    assert set(on_gpu) == {"train", "sync"}
    embedding = 2 * CONFIG["vocab_size"] * CONFIG["hidden_size"]
    assert on_gpu["sync"] == 4 * embedding, "two buckets and room for one in float32 from the host, no engine"


def test_probe_of_a_small_model_measures_what_is_estimated(tmp_path: Path):
    """Two processes' worth of imports, no Ray. The activations of 8,192 tokens are most of what the model adds."""
    model = tmp_path / "tiny"
    tool = ROOT / "tools" / "make_tiny_model.py"
    subprocess.run([sys.executable, str(tool), "--output", str(model), "--untrained"], check=True, capture_output=True)
    words = f"--hf-checkpoint {model} --prompt-data {model}/data/train.jsonl --label-key label --rm-type exact"
    sizes = "--rollout-batch-size 8 --n-samples-per-prompt 4 --num-rollout 2 --rollout-max-response-len 200"
    one = "--actor-num-gpus-per-node 1 --num-gpus-per-node 1 --colocate --device cpu --input-key prompt --probe"
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *words.split(), *sizes.split(), *one.split()],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines() if line.startswith(("train", "sync"))}
    predicted, measured = float(rows["train"][1]), float(rows["train"][3])
    assert measured > 0.7 and measured == pytest.approx(predicted, rel=0.3)
    assert float(rows["sync"][3]) < measured
    assert not (tmp_path / "runs").exists(), "a probe leaves no run folder"
