"""A checkpoint that is being written when the run ends: kept if it is complete, never half of it."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from rlkit.orchestration.checkpoints import MARKER, CheckpointMeta, staging_dir
from rlkit.orchestration.pending_save import PendingSave


class Ranks:
    def __init__(self, *, is_done: bool) -> None:
        self.is_done, self.was_asked = is_done, False

    def is_save_done(self) -> bool:
        self.was_asked = True
        return self.is_done

    def finish_save(self) -> None: ...


def pending(folder: Path, ranks: Any) -> PendingSave:
    staging = staging_dir(folder, 2)
    (staging / "trainer").mkdir()
    (staging / "trainer" / "model").write_text("weights")
    meta = CheckpointMeta(step=2, weight_version=3, world_size=1)
    return PendingSave(ranks, staging, meta, {"next_group_id": 1}, {})


@pytest.mark.parametrize(
    ("is_done", "may_ask", "is_kept"), [(True, True, True), (False, True, False), (True, False, False)]
)
def test_what_is_written_is_rescued(tmp_path: Path, is_done: bool, may_ask: bool, is_kept: bool) -> None:
    ranks = Ranks(is_done=is_done)
    saved = pending(tmp_path, ranks).rescue(may_ask_ranks=may_ask)
    assert (saved is not None) == is_kept == (tmp_path / "iter_0000002" / MARKER).is_file()
    assert ranks.was_asked == may_ask


def test_a_commit_that_has_begun_is_finished_without_asking_ranks(tmp_path: Path) -> None:
    ranks = Ranks(is_done=True)
    save = pending(tmp_path, ranks)
    save.advance()
    ranks.was_asked = False
    assert save.rescue(may_ask_ranks=False) is not None and not ranks.was_asked


def test_a_failed_save_is_not_tried_again(tmp_path: Path) -> None:
    save = pending(tmp_path, Ranks(is_done=True))
    shutil.rmtree(tmp_path / ".iter_0000002.tmp")
    assert save.rescue(may_ask_ranks=True) is None
