"""A checkpoint is used only when its files and the ledger of its run agree with it; how an attempt ended is written."""

from pathlib import Path

import pytest

from rlkit.config.schema import RunConfig
from rlkit.observability.ledger import Ledger, LedgerEvent, read_ledger
from rlkit.orchestration.checkpoints import CheckpointMeta, commit, staging_dir
from rlkit.orchestration.resuming import checkpoint_to_continue, note_end, write_saved, write_start
from rlkit.types.errors import CheckpointError, RunStopped, WorkerDied


def state(next_group: int) -> dict:
    return {
        "prompts": {"epoch": 0, "drawn": next_group},
        "next_group_id": next_group,
        "waiting": [{"group": {"group_id": 99, "samples": ["long"]}, "first_step": 0}],
    }


def run_of_one_step(run: Path) -> None:
    """Two groups, trained and saved."""
    with Ledger(run / "ledger.jsonl") as ledger:
        write_start(ledger, RunConfig(), None, 0)
        ledger.write(
            LedgerEvent.DRAWN, step=0, first_group=0, num_groups=2, begin=[0, 0], end=[0, 2], too_long=0, num_rows=9
        )
        for group in (0, 1):
            ledger.write(LedgerEvent.ISSUED, step=0, group=group, position=group, epoch=0, num_samples=1, seeds=[1])
            ledger.write(LedgerEvent.KEPT, step=0, group=group)
        ledger.write(LedgerEvent.TRAINED, step=0, rank=0, groups=[0, 1], step_samples=2)
        write_saved(ledger, *save(run, 2))


def save(run: Path, next_group: int) -> tuple[CheckpointMeta, Path, dict]:
    staging = staging_dir(run / "checkpoints", 0)
    (staging / "trainer").mkdir()
    (staging / "trainer" / "model").write_text("weights")
    meta = CheckpointMeta(step=0, weight_version=1, world_size=1)
    return meta, commit(staging, meta, state(next_group)), state(next_group)


def continue_run(run: Path, load: Path | None = None):
    save_dir = run / "checkpoints"
    return checkpoint_to_continue(load or save_dir, save_dir, run / "ledger.jsonl", step=None)


def test_what_agrees_is_continued_from(tmp_path):
    run_of_one_step(tmp_path)
    found = continue_run(tmp_path)
    assert found is not None and found.meta.step == 0
    saved = [r.fields for r in read_ledger(tmp_path / "ledger.jsonl") if r.event is LedgerEvent.SAVED]
    assert saved[0]["rollout_state"]["waiting"] == [{"group": {"group_id": 99}}]  # ids, not tokens


@pytest.mark.parametrize("next_group, said", [(1, "trained twice"), (7, "5 groups would be skipped")])
def test_a_place_in_the_data_that_the_ledger_denies(tmp_path, next_group, said):
    run_of_one_step(tmp_path)
    save(tmp_path, next_group)
    with pytest.raises(CheckpointError, match=f"disagree: .*{said}.*--ckpt-step"):
        continue_run(tmp_path)


def test_a_damaged_file_is_found_before_anything_starts(tmp_path):
    run_of_one_step(tmp_path)
    (tmp_path / "checkpoints" / "iter_0000000" / "trainer" / "model").write_text("weightz")
    with pytest.raises(CheckpointError, match="trainer/model has other content"):
        continue_run(tmp_path)


def test_a_checkpoint_of_another_run_is_not_held_against_this_ledger(tmp_path):
    run_of_one_step(tmp_path / "first")
    save(tmp_path / "first", 7)
    (tmp_path / "second" / "checkpoints").mkdir(parents=True)
    assert continue_run(tmp_path / "second", load=tmp_path / "first" / "checkpoints") is not None
    with pytest.raises(CheckpointError, match=r"--load .* holds no checkpoint"):
        continue_run(tmp_path / "second", load=tmp_path / "nowhere")


def test_a_run_that_was_started_from_another_continues_from_its_own_checkpoints(tmp_path):
    """The same command again: --load says where it began."""
    run_of_one_step(tmp_path / "first")
    run_of_one_step(tmp_path / "second")
    found = continue_run(tmp_path / "second", load=tmp_path / "first" / "checkpoints")
    assert found is not None and found.path.parent == tmp_path / "second" / "checkpoints"


def test_without_a_ledger_there_is_a_warning(tmp_path, caplog):
    run_of_one_step(tmp_path)
    (tmp_path / "ledger.jsonl").unlink()
    assert continue_run(tmp_path) is not None
    assert "cannot be checked" in caplog.text


@pytest.mark.parametrize(
    "error, event, fields",
    [
        (None, LedgerEvent.FINISHED, {"step": 4}),
        (RunStopped("x"), LedgerEvent.STOPPED, {"step": 4, "signal": "SIGTERM", "saved": True}),
        (KeyboardInterrupt(), LedgerEvent.STOPPED, {"step": 4, "signal": "SIGINT", "saved": False}),
        (WorkerDied("rank 1"), LedgerEvent.FAILED, {"error": "WorkerDied", "message": "rank 1"}),
    ],
    ids=["finished", "SIGTERM", "Ctrl-C", "failed"],
)
def test_the_end_is_written(tmp_path, error, event, fields):
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        note_end(ledger, error, next_step=4)
    (record,) = read_ledger(tmp_path / "ledger.jsonl")
    assert (record.event, record.fields) == (event, fields)
