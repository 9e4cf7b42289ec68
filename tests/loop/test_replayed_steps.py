"""A recorded step trains again to the same bits; whatever was changed since is named. And what every run leaves behind:
samples with differences, the report, no guard."""

import json
import re
from pathlib import Path

import pytest

from rlkit.cli.main import main
from rlkit.observability.replay_files import batch_path
from rlkit.observability.sample_files import read_samples, samples_path

pytestmark = pytest.mark.loop

COLOCATED = ("--actor-num-gpus-per-node", 1, "--colocate")


@pytest.fixture
def recorded(run_training) -> Path:
    run = run_training(*COLOCATED, "--num-rollout", 3, "--save-interval", 2, "--record-for-replay", 3)
    return run.directory


def replayed(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    status = main(["replay", *map(str, words)])
    told = capsys.readouterr()
    return status, told.out + told.err


@pytest.mark.slow
def test_a_recorded_step_is_the_same_and_changes_are_named(recorded: Path, capsys: pytest.CaptureFixture[str]):
    step = read_samples(samples_path(recorded, 2))
    assert 4 <= len(step.samples) <= 8 and all(sample.head.gaps for sample in step.samples)
    assert all(sample.max_gap is not None and sample.max_gap < 1e-2 for sample in step.samples)
    report = (recorded / "report.html").read_text(encoding="utf-8")
    assert "Nothing stands out" in report and "Step 2: " in report and "finished" in report

    status, told = replayed(capsys, recorded, "--step", 2, "--rollout")
    assert (status, told.splitlines()[-1]) == (0, "the same, bit for bit"), told
    assert "replaying steps 2 to 2 from checkpoint iter_0000001" in told and "generated again with their seeds" in told

    status, told = replayed(capsys, recorded, "--step", 2, "--", "--lr", "1e-3")
    assert status == 1 and "a changed flag: --lr was 0.003 and is 0.001" in told
    assert re.search(r"differs: step 2: tensor model\.\S+ was", told) and "train/loss was" not in told

    batch = batch_path(recorded, 2)
    lines = batch.read_text().splitlines()
    group = json.loads(lines[3])
    group["samples"][1]["reward"] = 0.123
    batch.write_text("\n".join([*lines[:3], json.dumps(group), *lines[4:]]) + "\n")
    status, told = replayed(capsys, recorded, "--step", 2)
    assert status == 1 and f"a changed batch: step 2: group {group['group_id']} has other content" in told
    assert "differs: step 2: train/" in told


@pytest.mark.slow
def test_changed_weights_at_the_start_are_named(recorded: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]):
    """The steps before the first checkpoint begin with --hf-checkpoint, of which nothing else keeps a digest."""
    from safetensors.torch import load_file, save_file

    path = tiny_model / "model.safetensors"
    original = path.read_bytes()
    try:
        weights = load_file(path)
        name = "model.layers.1.mlp.up_proj.weight"
        weights[name][0, 0] += 1e-3
        save_file(weights, path, metadata={"format": "pt"})
        status, told = replayed(capsys, recorded, "--step", 0)
    finally:
        path.write_bytes(original)
    assert status == 1 and f"changed weights at the start: tensor model.{name} was" in told, told
    assert "(1 of " in told

    status, told = replayed(capsys, recorded, "--step", 9)
    assert status == 2 and "--record-for-replay" in told
