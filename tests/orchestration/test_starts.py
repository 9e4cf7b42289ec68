"""What a start takes from earlier work: weights alone, a row that was never written, an evaluation made again."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rlkit.cli.main import main
from rlkit.config.schema import CheckpointConfig, EvalConfig, RolloutConfig, RunConfig
from rlkit.observability.metrics import JsonlSink
from rlkit.orchestration.checkpoints import (
    MARKER,
    Checkpoint,
    CheckpointMeta,
    check_not_counted_twice,
    commit,
    find_checkpoint,
    staging_dir,
    start_step,
    verify,
)
from rlkit.orchestration.manifest import read_manifest
from rlkit.orchestration.resuming import lost_row, weights_to_begin_with, write_step_metrics
from rlkit.orchestration.session import RunFolders, Session
from rlkit.types.errors import CheckpointError

NO_METRICS: Mapping[str, float] = {}


def save(directory: Path, step: int, metrics: Mapping[str, float] = NO_METRICS) -> Checkpoint:
    staging = staging_dir(directory, step)
    (staging / "trainer").mkdir()
    (staging / "trainer" / "model").write_text("weights")
    write_step_metrics(staging, metrics)
    commit(staging, CheckpointMeta(step=step, weight_version=step + 1, world_size=1), {"next_group_id": 7})
    found = find_checkpoint(directory, step)
    assert found is not None
    return found


# ---- manifest ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["edited", "emptied", "missing"])
def test_a_changed_manifest_is_found(tmp_path: Path, change: str, capsys: pytest.CaptureFixture[str]):
    """A manifest that was changed together with a file would otherwise vouch for it."""
    checkpoint = save(tmp_path, 3)
    assert main(["ckpt", "verify", str(tmp_path)]) == 0
    path = checkpoint.path / "manifest.json"
    fields = json.loads(path.read_text())
    match change:
        case "edited":
            fields["tensors"] = {}
            path.write_text(json.dumps(fields | {"next_group_id": 8}, indent=1))
        case "emptied":
            path.write_text("")
        case _:
            path.unlink()
    assert main(["ckpt", "verify", str(tmp_path)]) == 1
    assert "iter_0000003: BAD" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        verify(checkpoint)


def test_checkpoints_of_older_versions_are_still_read(tmp_path: Path):
    """Their marker is empty."""
    checkpoint = save(tmp_path, 3)
    (checkpoint.path / MARKER).write_text("")
    assert read_manifest(checkpoint.path) is not None
    verify(checkpoint)


# ---- steps -------------------------------------------------------------------------------------------------------


def test_a_start_below_the_checkpoint_is_refused_with_the_remedy(tmp_path: Path):
    save(tmp_path, 11)
    for step in (0, 11):
        with pytest.raises(CheckpointError, match=r"up to iter_0000011\. .* --ckpt-step, .* --finetune --load"):
            check_not_counted_twice(tmp_path, step)
    for step in (12, 40, None):
        check_not_counted_twice(tmp_path, step)
    check_not_counted_twice(tmp_path / "fresh", 0)


def test_a_session_refuses_before_it_touches_anything(tmp_path: Path):
    save(tmp_path / "checkpoints", 11)
    cfg = RunConfig(rollout=RolloutConfig(start_rollout_id=3))
    run = Session(cfg, num_steps=20, run_dir=tmp_path, config_json={})
    with pytest.raises(CheckpointError, match="--start-rollout-id 3"), run._exit:
        run._open_run_folder()
    assert not (tmp_path / "ledger.jsonl").exists() and not (tmp_path / "config.json").exists()


# ---- weights alone -----------------------------------------------------------------------------------------------


def test_weights_are_taken_without_what_lies_behind_them(tmp_path: Path):
    save(tmp_path / "old", 11)
    found = weights_to_begin_with(tmp_path / "old", tmp_path / "new", step=None)
    assert found is not None and found.trainer_dir.is_dir()
    assert found.rollout_state == {} and found.meta.weight_version == 0
    assert start_step(found, None) == 0


def test_own_checkpoints_come_before_weights_of_others(tmp_path: Path):
    save(tmp_path / "old", 11)
    save(tmp_path / "new", 2)
    assert weights_to_begin_with(tmp_path / "old", tmp_path / "new", step=None) is None
    assert weights_to_begin_with(tmp_path / "new", tmp_path / "new", step=None) is None


def test_weights_that_are_not_there(tmp_path: Path):
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        weights_to_begin_with(tmp_path / "old", tmp_path / "new", step=None)


def test_a_new_run_opens_at_step_0_with_the_weights_of_another(tmp_path: Path):
    """The session's own bookkeeping, without processes: the optimizer is new, the ledger begins."""
    save(tmp_path / "old", 11)
    cfg = RunConfig(checkpoint=CheckpointConfig(load=str(tmp_path / "old"), finetune=True))
    run = Session(cfg, num_steps=5, run_dir=tmp_path / "run", config_json={})
    with run._exit:
        run._open_run_folder()
    assert run.start_step == 0 and run.cfg.checkpoint.no_load_optim
    events = [json.loads(line)["event"] for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()]
    assert events[0] == "started"
    assert RunFolders.of(cfg, tmp_path / "run").load == tmp_path / "old"


# ---- rows --------------------------------------------------------------------------------------------------------


def test_the_row_of_a_step_that_was_saved_and_never_reported_is_written_at_the_next_start(tmp_path: Path):
    metrics = tmp_path / "metrics.jsonl"
    checkpoint = save(tmp_path / "checkpoints", 4, {"train/loss": 0.5, "train/odd": float("nan")})
    sink = JsonlSink(metrics)
    sink.write(3, {"train/loss": 0.6, "time/step_s": 1.0})
    sink.write(4, {"eval/heldout": 0.1})  # of the weights before step 4: no row of the step
    sink.close()
    assert lost_row(metrics, checkpoint) == {"train/loss": 0.5}
    sink = JsonlSink(metrics)
    sink.write(4, {"train/loss": 0.5, "time/step_s": 1.0})
    sink.close()
    assert lost_row(metrics, checkpoint) is None


def test_a_checkpoint_of_an_older_version_has_no_row(tmp_path: Path):
    checkpoint = save(tmp_path / "checkpoints", 4)
    (checkpoint.path / "step_metrics.json").unlink()
    JsonlSink(tmp_path / "metrics.jsonl").close()
    assert lost_row(tmp_path / "metrics.jsonl", checkpoint) is None


class Evaluations:
    """Stands for the rollout manager and for the metric log."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.written: list[int] = []

    def evaluate(self, step: int) -> dict[str, float]:
        self.steps.append(step)
        return {"eval/x": 1.0}

    def write(self, step: int, metrics: Any) -> None:
        self.written.append(step)


@pytest.mark.parametrize(
    ("start", "is_resumed", "skips", "expected"),
    [
        (0, False, False, [0]),
        (0, False, True, []),
        (4, True, True, [4]),  # due after step 3: its row was of weights that this start has again
        (5, True, True, []),
        (5, True, False, [5]),
        (4, False, True, []),  # --start-rollout-id without a checkpoint, or --load of another run
    ],
)
def test_evaluation_at_the_start(tmp_path: Path, start: int, is_resumed: bool, skips: bool, expected: list[int]):
    cfg = RunConfig(evaluation=EvalConfig(eval_interval=2, skip_eval_before_train=skips))
    run, fake = Session(cfg, num_steps=20, run_dir=tmp_path, config_json={}), Evaluations()
    run.start_step, run._goes_on = start, is_resumed
    run.rollouts, run._log = fake, fake  # pyright: ignore[reportAttributeAccessIssue]
    run.evaluate_if_due(start)
    assert fake.steps == fake.written == expected
    run.evaluate_if_due(start + 1)
    assert fake.steps == expected + ([start + 1] if (start + 1) % 2 == 0 else [])


def test_a_session_that_goes_on_writes_the_lost_row(tmp_path: Path):
    """Opened twice without processes: the row of step 4 is in the checkpoint and not in metrics.jsonl."""
    save(tmp_path / "checkpoints", 4, {"train/loss": 0.5})
    for _ in range(2):
        run = Session(RunConfig(), num_steps=20, run_dir=tmp_path, config_json={})
        with run._exit:
            run._open_run_folder()
        assert run.start_step == 5
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == [{"step": 4, "train/loss": 0.5}]


def test_the_row_of_another_run_is_not_taken_over(tmp_path: Path):
    save(tmp_path / "old", 4, {"train/loss": 0.5})
    cfg = RunConfig(checkpoint=CheckpointConfig(load=str(tmp_path / "old")))
    run = Session(cfg, num_steps=20, run_dir=tmp_path / "run", config_json={})
    with run._exit:
        run._open_run_folder()
    assert run.start_step == 5 and (tmp_path / "run" / "metrics.jsonl").read_text() == ""
