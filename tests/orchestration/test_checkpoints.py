"""Which checkpoint a run continues from, and that a save is all or nothing."""

import json
import logging
from pathlib import Path

import pytest

from rlkit.orchestration import manifest as manifest_module
from rlkit.orchestration.checkpoints import (
    MARKER,
    POINTER,
    CheckpointMeta,
    commit,
    complete_checkpoints,
    find_checkpoint,
    prune,
    staging_dir,
    start_step,
    verify,
)
from rlkit.orchestration.manifest import read_manifest
from rlkit.types.errors import CheckpointError

CASES = {
    case["id"]: case
    for case in map(json.loads, (Path(__file__).parents[1] / "data" / "cases.jsonl").read_text().split("\n")[:-1])
}


def save(directory: Path, step: int, **state) -> Path:
    staging = staging_dir(directory, step)
    (staging / "trainer").mkdir()
    (staging / "trainer" / "model").write_text("weights")
    return commit(staging, CheckpointMeta(step=step, weight_version=step + 1, world_size=1), state)


def half_save(directory: Path, step: int) -> None:
    path = directory / f"iter_{step:07d}"
    (path / "trainer").mkdir(parents=True)


def test_round_trip(tmp_path):
    save(tmp_path, 11, next_group=352)
    found = find_checkpoint(tmp_path)
    assert found is not None
    assert (found.meta.step, found.meta.weight_version, found.rollout_state) == (11, 12, {"next_group": 352})
    assert (found.trainer_dir / "model").read_text() == "weights"
    assert (tmp_path / POINTER).read_text() == "11\n"


def test_start_step_rs_01(tmp_path):
    """Case rs-01: after the loaded step, unless a start is given; 0 with neither."""
    save(tmp_path, 11)
    loaded = find_checkpoint(tmp_path)
    starts = [
        start_step(loaded if case["load"] == "dir with latest iteration 11" else None, case["start_rollout_id"])
        for case in CASES["rs-01"]["input"]["cases"]
    ]
    assert starts == CASES["rs-01"]["expected"]["start"]


@pytest.mark.parametrize("pointer", [None, "10\n"], ids=["no pointer", "pointer names the half one"])
def test_incomplete_newest_is_skipped_rs_03(tmp_path, caplog, pointer):
    """Case rs-03."""
    save(tmp_path, 5)
    save(tmp_path, 7)
    half_save(tmp_path, 10)
    (tmp_path / POINTER).unlink()
    if pointer is not None:
        (tmp_path / POINTER).write_text(pointer)
    with caplog.at_level(logging.WARNING):
        found = find_checkpoint(tmp_path)
    assert found is not None and found.meta.step == 7
    assert "iter_0000010" in caplog.text


def test_complete_without_data_state_is_an_error_rs_03(tmp_path):
    """Case rs-03, second part: never a silent restart of the data at row 0."""
    (save(tmp_path, 5) / "rollout_state.json").unlink()
    with pytest.raises(CheckpointError, match=r"rollout_state\.json"):
        find_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["meta.json", "rollout_state.json"])
@pytest.mark.parametrize("content", ["", '{"step": ', "[5]"])
def test_a_damaged_part_of_a_complete_one_is_an_error(tmp_path, name, content):
    (save(tmp_path, 5) / name).write_text(content)
    with pytest.raises(CheckpointError, match=f"{name} is damaged .* --ckpt-step"):
        find_checkpoint(tmp_path)


def test_only_unfinished_ones_is_an_error(tmp_path):
    half_save(tmp_path, 3)
    with pytest.raises(CheckpointError, match="iter_0000003"):
        find_checkpoint(tmp_path)


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir()], ids=["absent", "empty"])
def test_no_checkpoint_at_all(tmp_path, make):
    make(tmp_path / "checkpoints")
    assert find_checkpoint(tmp_path / "checkpoints") is None


def test_a_chosen_step(tmp_path):
    save(tmp_path, 5)
    save(tmp_path, 7)
    found = find_checkpoint(tmp_path, 5)
    assert found is not None and found.meta.step == 5
    with pytest.raises(CheckpointError, match=r"--ckpt-step 6 .* \[5, 7\]"):
        find_checkpoint(tmp_path, 6)


def test_interrupted_save_leaves_nothing_that_counts(tmp_path):
    save(tmp_path, 5)
    staging_dir(tmp_path, 6)  # and then the process dies
    found = find_checkpoint(tmp_path)
    assert found is not None and found.meta.step == 5
    save(tmp_path, 6)
    found = find_checkpoint(tmp_path)
    assert found is not None and found.meta.step == 6


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 5, next_group=1)
    save(tmp_path, 5, next_group=2)
    found = find_checkpoint(tmp_path)
    assert found is not None and found.rollout_state == {"next_group": 2}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000005", POINTER]


@pytest.mark.parametrize("keep, left", [(None, [3, 5, 7]), (2, [5, 7]), (1, [7]), (9, [3, 5, 7])])
def test_retention_keeps_the_newest_complete(tmp_path, keep, left):
    for step in (3, 5, 7):
        save(tmp_path, step)
    half_save(tmp_path, 9)
    prune(tmp_path, keep)
    assert sorted(int(path.parent.name[5:]) for path in tmp_path.glob(f"iter_*/{MARKER}")) == left


def test_every_file_is_verified(tmp_path):
    path = save(tmp_path, 5, next_group_id=3, prompts={"epoch": 1, "drawn": 4})
    found = find_checkpoint(tmp_path)
    assert found is not None
    verify(found)
    manifest = read_manifest(path)
    assert manifest is not None
    assert (manifest.step, manifest.weight_version, manifest.next_group_id) == (5, 6, 3)
    assert manifest.data_position == {"epoch": 1, "drawn": 4}
    assert manifest.files.keys() == {"meta.json", "rollout_state.json", "trainer/model"}


@pytest.mark.parametrize(
    "damage, said",
    [
        (lambda file: file.write_text("weightz"), "trainer/model has other content"),
        (lambda file: file.write_text("weight"), "trainer/model has 6 bytes instead of 7"),
        (lambda file: file.unlink(), "trainer/model is missing"),
    ],
    ids=["a flipped bit", "cut off", "deleted"],
)
def test_damaged_files_are_never_loaded(tmp_path, damage, said):
    save(tmp_path, 3)
    path = save(tmp_path, 5)
    damage(path / "trainer" / "model")
    found = find_checkpoint(tmp_path)
    assert found is not None
    with pytest.raises(CheckpointError, match=f"{said}.*--ckpt-step .*iter_0000003"):
        verify(found)


def test_large_files_are_digested_in_pieces(tmp_path, monkeypatch):
    """The digest depends on every piece, and on their order."""
    monkeypatch.setattr(manifest_module, "PIECE_BYTES", 4)
    (tmp_path / "a").write_bytes(b"0123456789")
    (tmp_path / "b").write_bytes(b"4567012389")
    (tmp_path / "empty").write_bytes(b"")
    first = manifest_module.digest_files(tmp_path)
    assert first["a"].digest != first["b"].digest and first["empty"].num_bytes == 0
    (tmp_path / "a").write_bytes(b"012345678x")
    assert manifest_module.digest_files(tmp_path)["a"].digest != first["a"].digest


def test_retention_after_a_rewind_keeps_what_was_saved_last(tmp_path):
    """--ckpt-step 3 with 5 and 7 on the disk: the new 4 is the last good one, whatever else is there."""
    for step in (3, 5, 7):
        save(tmp_path, step)
    save(tmp_path, 4)
    prune(tmp_path, 1, newest=4)
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["iter_0000004", "iter_0000005", "iter_0000007"]
