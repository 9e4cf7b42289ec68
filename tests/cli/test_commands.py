"""`rlkit audit` and `rlkit ckpt` on small folders: what they print and their exit status."""

import json
from pathlib import Path

import pytest

from rlkit.cli.main import main
from rlkit.observability.ledger import Ledger, LedgerEvent
from rlkit.orchestration.checkpoints import CheckpointMeta, commit, staging_dir


def write_run(path: Path, *, trained: list[int]) -> None:
    with Ledger(path / "ledger.jsonl") as ledger:
        ledger.write(LedgerEvent.STARTED, step=0, source="labels", rollout_state={})
        ledger.write(
            LedgerEvent.DRAWN, step=0, first_group=0, num_groups=2, begin=[0, 0], end=[0, 2], too_long=0, num_rows=9
        )
        for group in (0, 1):
            ledger.write(LedgerEvent.ISSUED, step=0, group=group, position=group, epoch=0, num_samples=1, seeds=[group])
            ledger.write(LedgerEvent.KEPT, step=0, group=group)
        ledger.write(LedgerEvent.TRAINED, step=0, rank=0, groups=trained, step_samples=len(trained))
        ledger.write(LedgerEvent.FINISHED, step=1)


def save(directory: Path, step: int, tensors: dict[str, str]) -> Path:
    staging = staging_dir(directory, step)
    (staging / "trainer").mkdir()
    (staging / "trainer" / "model").write_text(str(tensors))
    return commit(staging, CheckpointMeta(step=step, weight_version=step + 1, world_size=2), {}, tensors=tensors)


def test_audit_of_a_good_run(tmp_path, capsys):
    write_run(tmp_path, trained=[0, 1])
    assert main(["audit", str(tmp_path)]) == 0
    assert "proven: nothing skipped, nothing trained twice" in capsys.readouterr().out


def test_audit_of_a_run_that_lost_a_group(tmp_path, capsys):
    write_run(tmp_path, trained=[0])
    assert main(["audit", str(tmp_path)]) == 1
    assert "WRONG: group 1 was kept in step 0 and never trained" in capsys.readouterr().out
    assert main(["audit", str(tmp_path), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["is_proven"] is False and report["num_trained"] == 1


@pytest.mark.parametrize("content", [None, '{"event":"eaten","time":1}\n'], ids=["no ledger", "not a ledger"])
def test_audit_of_something_else(tmp_path, capsys, content):
    if content is not None:
        (tmp_path / "ledger.jsonl").write_text(content)
    assert main(["audit", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_verify_names_the_damaged_file(tmp_path, capsys):
    folder = tmp_path / "checkpoints"
    save(folder, 1, {"model.w": "aa"})
    bad = save(folder, 2, {"model.w": "bb"})
    assert main(["ckpt", "verify", str(tmp_path)]) == 0
    (bad / "trainer" / "model").write_text("x")
    assert main(["ckpt", "verify", str(tmp_path)]) == 1
    told = capsys.readouterr().out
    assert "iter_0000001: good" in told and "iter_0000002: BAD" in told and "trainer/model has 1 bytes" in told
    assert main(["ckpt", "verify", str(folder / "iter_0000001")]) == 0
    assert main(["ckpt", "verify", str(tmp_path / "nowhere")]) == 1


def test_diff_tells_weights_from_optimizer_state(tmp_path, capsys):
    first = save(tmp_path, 1, {"model.a": "1", "model.b": "2", "exp_avg.a": "3"})
    second = save(tmp_path, 2, {"model.a": "9", "model.b": "2", "exp_avg.a": "4"})
    assert main(["ckpt", "diff", str(first), str(first)]) == 0
    capsys.readouterr()
    assert main(["ckpt", "diff", str(first), str(second)]) == 1
    told = capsys.readouterr().out
    assert "step: 1 -> 2" in told
    assert "weights: 1 of 2 tensors differ: model.a" in told
    assert "optimizer state: 1 of 1 tensors differ: exp_avg.a" in told
    assert main(["ckpt", "diff", str(first), str(tmp_path)]) == 1
    assert "has no manifest" in capsys.readouterr().err


def test_list(tmp_path, capsys):
    assert main(["ckpt", "list", str(tmp_path)]) == 1
    save(tmp_path, 1, {})
    (tmp_path / "iter_0000002").mkdir()
    assert main(["ckpt", "list", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "iter_0000001  step 1, weights v2, 2 ranks" in told and "iter_0000002  unfinished" in told


@pytest.mark.parametrize("argv", [[], ["audits", "x"]])
def test_wrong_use(argv, capsys):
    assert main(argv) == 2
    assert "audit" in "".join(capsys.readouterr())
