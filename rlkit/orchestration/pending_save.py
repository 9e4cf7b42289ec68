"""A checkpoint between the ranks' copy of their state and its commit. Called by `session.py`.

With `--async-save` training goes on meanwhile. Until the commit the folder has the name of a staging folder and no
marker, so a run that dies leaves nothing that looks complete.
"""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlkit.orchestration.checkpoints import CheckpointMeta, commit
from rlkit.orchestration.saving import all_or_nothing
from rlkit.orchestration.train_workers import TrainGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class CommittedSave:
    path: Path
    meta: CheckpointMeta
    rollout_state: dict[str, Any]


class PendingSave:
    """First the ranks write, then a thread of the driver commits: that reads all of it once more, for digests."""

    def __init__(
        self,
        actor: TrainGroup,
        staging: Path,
        meta: CheckpointMeta,
        rollout_state: dict[str, Any],
        tensors: Mapping[str, str],
    ) -> None:
        """After `actor.save` has returned. `rollout_state` and `tensors` are those of that moment."""
        self._actor = actor
        self._staging = staging
        self._meta = meta
        self._rollout_state = rollout_state
        self._tensors = tensors
        self._committing: Future[CommittedSave] | None = None

    def advance(self) -> CommittedSave | None:
        """Begin what can begin, without waiting. None until it is committed."""
        if self._committing is None:
            if not self._actor.is_save_done():
                return None
            with all_or_nothing(self._staging):
                self._actor.finish_save()
            pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="commit")
            self._committing = pool.submit(self._commit)
            pool.shutdown(wait=False)
        return self._committing.result() if self._committing.done() else None

    def finish(self) -> CommittedSave:
        """Wait until it is committed."""
        if self._committing is not None:
            return self._committing.result()
        with all_or_nothing(self._staging):
            self._actor.finish_save()
        return self._commit()

    def rescue(self, *, may_ask_ranks: bool) -> CommittedSave | None:
        """For a run that ends early: commit what is written, None where it is not. Ranks that may be hung or at work
        are not asked.
        """
        if self._committing is None:
            if not self._staging.is_dir():
                return None  # a save that failed has removed it
            if not (may_ask_ranks and self._actor.is_save_done()):
                return None
        return self.finish()

    def _commit(self) -> CommittedSave:
        with all_or_nothing(self._staging):
            path = commit(self._staging, self._meta, self._rollout_state, tensors=self._tensors)
        return CommittedSave(path=path, meta=self._meta, rollout_state=self._rollout_state)
