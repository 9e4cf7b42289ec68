"""A save that cannot be trusted, or cannot be written, is an error, and the state before it stays."""

import errno
import shutil
from pathlib import Path

import pytest

from rlkit.orchestration import checkpoints
from rlkit.orchestration.checkpoints import Checkpoint, CheckpointMeta, commit, find_checkpoint, staging_dir, verify
from rlkit.orchestration.saving import SaveGuard, all_or_nothing, check_loaded
from rlkit.types.errors import CheckpointError

OLD = {"model.w": "aa", "exp_avg.w": "01"}
NEW = {"model.w": "bb", "exp_avg.w": "02"}
TRAINED = {"train/grad_norm": 0.5, "train/lr": 1e-6}


def save(directory: Path, step: int, tensors: dict[str, str] = OLD, content: str = "weights") -> None:
    staging = staging_dir(directory, step)
    with all_or_nothing(staging):
        (staging / "trainer").mkdir()
        (staging / "trainer" / "model").write_text(content)
        commit(staging, CheckpointMeta(step=step, weight_version=step + 1, world_size=1), {}, tensors=tensors)


def newest(directory: Path) -> Checkpoint:
    found = find_checkpoint(directory)
    assert found is not None
    return found


def test_weights_that_did_not_move_are_not_saved(tmp_path):
    """Moments differ, weights do not: what a save of stale weights looks like."""
    guard = SaveGuard(tmp_path, None)
    guard.note_training(0, TRAINED)
    guard.check_changed(0, OLD)
    guard.note_training(1, TRAINED)
    with pytest.raises(CheckpointError, match=r"after step 1 .* saved after step 0, although step 1 .* norm of 0.5"):
        guard.check_changed(1, {**OLD, "exp_avg.w": "02"})


def test_the_checkpoint_of_the_attempt_before_counts(tmp_path):
    save(tmp_path, 3)
    guard = SaveGuard(tmp_path, newest(tmp_path))
    guard.note_training(4, TRAINED)
    with pytest.raises(CheckpointError, match="saved after step 3"):
        guard.check_changed(4, OLD)


@pytest.mark.parametrize(
    "metrics, tensors",
    [
        (TRAINED, NEW),
        ({"train/grad_norm": 0.0, "train/lr": 1e-6}, OLD),
        ({"train/grad_norm": 0.5, "train/lr": 0.0}, OLD),
        ({}, OLD),
    ],
    ids=["moved", "no gradient", "no learning rate", "nothing trained"],
)
def test_these_saves_are_fine(tmp_path, metrics, tensors):
    save(tmp_path, 3)
    guard = SaveGuard(tmp_path, newest(tmp_path))
    guard.note_training(4, metrics)
    guard.check_changed(4, tensors)


def test_a_full_disk_is_seen_before_anything_is_written(tmp_path, monkeypatch):
    save(tmp_path, 3, content="w" * 1000)
    guard = SaveGuard(tmp_path, None)
    guard.check_space(num_params=10)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=900))
    with pytest.raises(CheckpointError, match=r"has 0\.00 GB free; nothing was written"):
        guard.check_space(num_params=10)
    assert newest(tmp_path).meta.step == 3


def test_without_an_earlier_checkpoint_the_size_follows_from_the_parameters(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=12_000))
    guard = SaveGuard(tmp_path / "new", None)
    guard.check_space(num_params=900)
    with pytest.raises(CheckpointError, match="free"):
        guard.check_space(num_params=1000)


@pytest.mark.parametrize("part", ["manifest.json", "COMPLETE"])
def test_a_disk_that_fills_up_meanwhile_keeps_the_last_good_state(tmp_path, monkeypatch, part):
    save(tmp_path, 3)
    write = checkpoints.write_durably

    def full(path: Path, text: str) -> None:
        if path.name == part:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, text)

    monkeypatch.setattr(checkpoints, "write_durably", full)
    with pytest.raises(CheckpointError, match=r"No space left on device.*removed; the checkpoints before it"):
        save(tmp_path, 4, NEW)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["iter_0000003"]
    verify(newest(tmp_path))
    assert newest(tmp_path).meta.step == 3


def test_loaded_tensors_are_compared(tmp_path):
    save(tmp_path, 3)
    checkpoint = newest(tmp_path)
    check_loaded(checkpoint, OLD, with_optimizer=True)
    check_loaded(checkpoint, {"model.w": "aa"}, with_optimizer=False)
    with pytest.raises(CheckpointError, match=r"1 of 2 tensors .* exp_avg.w: saved 01, loaded 09"):
        check_loaded(checkpoint, {**OLD, "exp_avg.w": "09"}, with_optimizer=True)
    with pytest.raises(CheckpointError, match=r"model.w: saved aa, loaded absent"):
        check_loaded(checkpoint, {}, with_optimizer=False)


def test_a_critic_is_compared_where_there_is_one(tmp_path):
    """A run without a critic may continue from a checkpoint that holds one."""
    save(tmp_path, 3, {**OLD, "critic.model.w": "cc", "reference.model.w": "dd"})
    checkpoint = newest(tmp_path)
    check_loaded(checkpoint, OLD, with_optimizer=True)
    with pytest.raises(CheckpointError, match=r"critic\.model\.w: saved cc, loaded ee"):
        check_loaded(checkpoint, {**OLD, "critic.model.w": "ee"}, with_optimizer=True)
