"""The dry run, read as a person reads it."""

import io
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from rlkit.cli.dry_run import layout_lines, print_dry_run
from rlkit.cli.model_size import model_size
from rlkit.config.fields import all_fields
from rlkit.config.load import load_config
from rlkit.orchestration.layout import plan_layout

BASE = [
    *("--hf-checkpoint", "models/none", "--prompt-data", "none.jsonl", "--label-key", "label", "--rm-type", "math"),
    *("--num-rollout", "10", "--rollout-batch-size", "32", "--n-samples-per-prompt", "8"),
]
SPLIT = ["--actor-num-gpus-per-node", "4", "--rollout-num-gpus", "4", "--rollout-num-gpus-per-engine", "2"]


def dry_run(monkeypatch: pytest.MonkeyPatch, *argv: str, columns: int = 100) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    file = io.StringIO()
    print_dry_run(load_config([*BASE, *argv]), file)
    return file.getvalue()


def part(text: str, title: str) -> list[str]:
    """The lines below a title."""
    lines = text.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith(title))
    return lines[begin + 1 : lines.index("", begin)]


def test_values_stand_beside_their_origin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    Path("r.toml").write_text("lr = 2e-6\n[sglang]\nmem_fraction_static = 0.7")
    text = dry_run(monkeypatch, *SPLIT, "--config", "r.toml", "--rollout-stop", "A", "B", "--no-rollout-shuffle")
    rows = {line.split()[0]: line.split() for line in part(text, "Configuration") if line.startswith("    ")}
    assert rows["lr"] == ["lr", "2e-06", "file", "r.toml"]
    assert rows["sglang_mem_fraction_static"] == ["sglang_mem_fraction_static", "0.7", "file", "r.toml"]
    assert rows["rollout_stop"] == ["rollout_stop", "A", "B", "command", "line"]
    assert rows["rollout_shuffle"] == ["rollout_shuffle", "false", "command", "line"]
    assert "min_lr 0.0" in " ".join(text.split())


def test_every_field_is_shown(monkeypatch: pytest.MonkeyPatch):
    words = "\n".join(part(dry_run(monkeypatch, *SPLIT), "Configuration")).split()
    assert set(all_fields()) <= set(words)


@pytest.mark.parametrize("columns", [60, 80, 120, 300])
def test_no_line_is_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch, columns: int):
    text = dry_run(
        monkeypatch, "--actor-num-nodes", "16", "--colocate", "--rollout-num-gpus-per-engine", "8", columns=columns
    )
    assert max(map(len, text.splitlines())) <= min(columns, 120)


def test_batch_arithmetic(monkeypatch: pytest.MonkeyPatch):
    text = dry_run(monkeypatch, *SPLIT, "--global-batch-size", "64", "--rollout-max-prompt-len", "512", columns=200)
    assert part(" ".join(text.split("\n    ")), "One step")[:4] == [
        "  32 prompts x 8 samples = 256 samples per rollout",
        "  at most 1024 tokens per response, 262,144 generated tokens per rollout",
        "  = 4 optimizer steps x global batch of 64 samples",
        "  = 16 samples on each of 4 ranks per optimizer step",
    ]
    flat = " ".join(text.split())
    assert "512 + 1024 tokens: at most 5 of them in a micro-batch of max_tokens_per_gpu = 8192" in flat
    assert "so at least 4 micro-batches per rank and optimizer step" in flat
    assert "10 rollouts, 40 optimizer steps, 2,560 samples" in flat
    assert "by nccl, in buckets of 512 MiB" in flat


def test_a_sample_longer_than_the_budget_is_a_micro_batch(monkeypatch: pytest.MonkeyPatch):
    flat = " ".join(dry_run(monkeypatch, *SPLIT, "--max-tokens-per-gpu", "1000").split())
    assert "at most 1 of them in a micro-batch" in flat and "at least 64 micro-batches per rank" in flat


LAYOUTS: dict[str, tuple[list[str], list[str]]] = {
    "split": (
        SPLIT,
        [
            "  node 0   GPU     0  1  2  3  4  5  6  7",
            "           rank    0  1  2  3",
            "           engine              0  0  1  1",
        ],
    ),
    "shared": (
        ["--colocate", "--actor-num-gpus-per-node", "2", "--rollout-num-gpus", "1"],
        ["  node 0   GPU     0  1", "           rank    0  1", "           engine  0"],
    ),
    "two_nodes": (
        ["--rollout-num-gpus", "2"],
        [
            "  node 0   GPU     0  1  2  3  4  5  6  7",
            "           rank    0  1  2  3  4  5  6  7",
            "  node 1   GPU     0  1",
            "           engine  0  1",
        ],
    ),
    "no_engine": (
        ["--load-debug-rollout-data", "d_{rollout_id}", "--actor-num-gpus-per-node", "1"],
        ["  node 0   GPU     0", "           rank    0"],
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_is_drawn(monkeypatch: pytest.MonkeyPatch, name: str):
    argv, drawing = LAYOUTS[name]
    assert part(dry_run(monkeypatch, *argv), "Layout") == drawing


def test_many_nodes_are_cut_short(monkeypatch: pytest.MonkeyPatch):
    lines = part(dry_run(monkeypatch, "--actor-num-nodes", "16", "--colocate"), "Layout")
    assert [line.split()[1] for line in lines if line.startswith("  node")] == ["0", "1", "2", "15"]
    assert "  ... 12 more nodes ..." in lines


def test_narrow_terminals_break_a_node_into_rows():
    layout = plan_layout(load_config([*BASE, "--colocate"]).config)
    lines = list(layout_lines(layout, "GPU", 40))
    assert max(map(len, lines)) <= 40
    assert [word for line in lines if "rank" in line for word in line.split()[1:]] == [str(rank) for rank in range(8)]


def test_slots_per_node_agree_with_the_layout():
    for argv in (["--colocate"], SPLIT, ["--actor-num-nodes", "2", "--actor-num-gpus-per-node", "4", "--colocate"]):
        cfg = load_config([*BASE, *argv]).config
        assert plan_layout(cfg).slots_per_node == cfg.cluster.slots_per_node


# ---- memory ----------------------------------------------------------------------------------------------------------

QWEN3_4B: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 9728,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
QWEN25_05B: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
SMOLLM2_135M: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}


def checkpoint(folder: Path, config: dict[str, Any], tensors: dict[str, list[int]] | None = None) -> str:
    """A folder with a config.json and, if asked for, a safetensors file that has a header and no data."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        entries = {name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]} for name, shape in tensors.items()}
        header = json.dumps({"__metadata__": {"format": "pt"}} | entries).encode()
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return str(folder)


@pytest.mark.parametrize(
    ("config", "num_params"),
    [(QWEN3_4B, 4_022_468_096), (QWEN25_05B, 494_032_768), (SMOLLM2_135M, 134_515_008)],
    ids=["qwen3-4B", "qwen2.5-0.5B", "smollm2-135M"],
)
def test_parameters_from_config_json(tmp_path: Path, config: dict[str, Any], num_params: int):
    size = model_size(checkpoint(tmp_path / "m", config))
    assert size is not None and (size.num_params, size.source) == (num_params, "config.json")


def test_parameters_from_safetensors_headers(tmp_path: Path):
    tensors = {"model.embed_tokens.weight": [10, 4], "model.norm.weight": [4], "lm_head.weight": [10, 4]}
    untied = model_size(checkpoint(tmp_path / "a", {"model_type": "new"}, tensors))
    tied = model_size(checkpoint(tmp_path / "b", {"model_type": "new", "tie_word_embeddings": True}, tensors))
    assert untied is not None and (untied.num_params, untied.source) == (84, "safetensors")
    assert tied is not None and tied.num_params == 44


def test_unknown_architecture_is_not_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = checkpoint(tmp_path / "m", QWEN3_4B | {"model_type": "mamba"})
    assert model_size(folder) is None
    assert "not known" in dry_run(monkeypatch, *SPLIT, "--hf-checkpoint", folder)


def test_bytes_per_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = checkpoint(tmp_path / "m", QWEN3_4B)
    argv = ["--hf-checkpoint", folder, "--gpu-type", "H200", "--colocate", "--actor-num-gpus-per-node", "8"]
    flat = " ".join(dry_run(monkeypatch, *argv, "--rollout-num-gpus-per-engine", "2").split())
    gib = 4_022_468_096 / 1024**3
    assert f"trainer: {16 * gib / 8:.2f} GiB per rank (5% of 140.4 GiB, H200)" in flat
    assert f"trainer asleep: {12 * gib / 8:.2f} GiB of host memory per rank" in flat
    assert f"engine weights: {2 * gib / 2:.2f} GiB per GPU of an engine" in flat


def test_a_teacher_takes_memory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    argv = ["--hf-checkpoint", checkpoint(tmp_path / "student", QWEN25_05B), "--colocate", "--use-opd"]
    argv += ["--opd-teacher-load", checkpoint(tmp_path / "teacher", QWEN3_4B), "--actor-num-gpus-per-node", "8"]
    flat = " ".join(dry_run(monkeypatch, *argv).split())
    assert f"{2 * 4_022_468_096 / 1024**3 / 8:.2f} teacher model" in flat


def test_too_small_a_gpu_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    argv = ["--hf-checkpoint", checkpoint(tmp_path / "m", QWEN3_4B), "--gpu-memory-gib", "24"]
    argv += ["--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1"]
    assert "which does not fit" in " ".join(dry_run(monkeypatch, *argv).split())
    assert "which does not fit" not in " ".join(dry_run(monkeypatch, *argv, "--actor-num-gpus-per-node", "8").split())


# ---- notes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "is_noted"),
    [
        (SPLIT, True),
        ([*SPLIT, "--sglang-enable-deterministic-inference"], False),
        (["--colocate", "--rollout-engine", "embedded"], False),
        (["--colocate", "--device", "cpu"], False),
        (["--load-debug-rollout-data", "d"], False),
    ],
    ids=["sglang", "deterministic", "embedded", "cpu", "replay"],
)
def test_seeds_of_sglang_are_noted(monkeypatch: pytest.MonkeyPatch, argv: list[str], is_noted: bool):
    assert ("SGLang honours seeds only with" in dry_run(monkeypatch, *argv)) == is_noted


def test_advice_and_missing_files_are_notes(monkeypatch: pytest.MonkeyPatch):
    flat = " ".join(dry_run(monkeypatch, *SPLIT, "--rollout-top-p", "0.9").split())
    assert "rollout_top_p = 0.9" in flat and "a launch would stop here: hf_checkpoint = models/none" in flat
    assert flat.endswith("The configuration is consistent. Dry run: nothing was started.")
