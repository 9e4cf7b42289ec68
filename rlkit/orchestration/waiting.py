"""Waiting for Ray tasks without hanging on a dead partner: the first error wins, and a server process that ends is an
error too."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import RayActorError, RayTaskError

from rlkit.orchestration.processes import ServerProcess, last_lines
from rlkit.orchestration.waits import Waits
from rlkit.types.errors import EngineError, WorkerDied

logger = logging.getLogger(__name__)

POLL_S = 0.5
SETTLE_S = 2.0
"""After a first error the others get this long to fail too: a rank's death shows first as a broken connection of its
peers."""
LOG_OF = {"training rank": "train_rank{}.log", "rollout manager": "rollout.log"}
"""Log file by the name that `gather` is given."""


class Waiter:
    """Waits on behalf of the driver while it keeps an eye on the server processes of the run."""

    def __init__(self, run_dir: Path, waits: Waits) -> None:
        self.waits = waits
        self.on_end: Callable[[str, str], bool] | None = None
        """Asked with name and last words when a watched task ends; True means that it is taken care of."""
        self._log_dir = run_dir / "logs"
        self._watched: dict[ObjectRef, str] = {}
        self._local: dict[str, ServerProcess] = {}

    def watch_tasks(self, tasks: dict[ObjectRef, str]) -> None:
        """Each task ends only when the server process of that name does; its result says how."""
        self._watched.update(tasks)

    def watch_process(self, name: str, process: ServerProcess) -> None:
        """A server process of the driver itself."""
        self._local[name] = process

    def gather(
        self,
        refs: Sequence[ObjectRef],
        *,
        who: str,
        doing: str | None = None,
        on_poll: Callable[[], None] | None = None,
    ) -> list[Any]:
        """Results of `refs` in order; `who` names their workers in messages (`training rank`), `doing` what they
        are at (`training step 3`).

        Raises as soon as one of them fails, although its peers may still wait for it in a collective, and as soon as a
        watched process ends. `on_poll` is called about twice a second meanwhile.
        """
        pending: list[ObjectRef] = list(refs)

        def missing() -> str:
            numbers = [str(number) for number, ref in enumerate(refs) if ref in pending]
            return who if len(refs) == 1 else f"{who} {', '.join(numbers)} of {len(refs)}"

        with self.waits.waiting(missing, doing or "an answer"):
            while pending:
                ready, _ = ray.wait([*pending, *self._watched], num_returns=1, timeout=POLL_S)
                for ref in ready:
                    if ref in self._watched:
                        self._end_of(ref)
                        continue
                    self._check(ref, refs, who, doing)
                    pending.remove(ref)
                    self.waits.progress()
                self._check_local()
                if on_poll is not None:
                    on_poll()
        return [ray.get(ref) for ref in refs]

    def _end_of(self, ref: ObjectRef) -> None:
        """A server process has ended: EngineError, unless `on_end` takes care of it."""
        name, how = self._watched.pop(ref), str(result_of(ref, "the process that watches an engine"))
        if self.on_end is None or not self.on_end(name, how):
            raise EngineError(f"{name} ended while the run needed it: {how}")
        self.waits.progress()

    def _check(self, ref: ObjectRef, refs: Sequence[ObjectRef], who: str, doing: str | None) -> None:
        """Raise what the task raised, or the death of one of its peers where that is the reason."""
        while_ = f" while {doing}" if doing is not None else ""
        try:
            result_of(ref, f"{who} {refs.index(ref)}")
        except WorkerDied as death:
            raise self._with_log(f"{death}{while_}", who, refs.index(ref)) from death.__cause__
        except BaseException as first:
            others = [other for other in refs if other != ref]
            ready = ray.wait(others, num_returns=len(others), timeout=SETTLE_S)[0] if others else []
            for other in ready:
                try:
                    result_of(other, f"{who} {refs.index(other)}")
                except WorkerDied as death:
                    noticed = f"{who} {refs.index(ref)} noticed it as {type(first).__name__}: {first}"
                    raise self._with_log(f"{death}{while_}; {noticed}", who, refs.index(other)) from first
                except BaseException as error:
                    logger.info(f"{who} {refs.index(other)} failed too: {error}")
            raise

    def _with_log(self, message: str, who: str, number: int) -> WorkerDied:
        """Its last words, which nobody would look for in a file of its own."""
        path = self._log_dir / LOG_OF[who].format(number) if who in LOG_OF else None
        if path is None or not path.is_file():
            return WorkerDied(message)
        return WorkerDied(f"{message}\nthe end of {path}:\n{last_lines(path)}")

    def _check_local(self) -> None:
        for name, process in self._local.items():
            if process.exit_status() is not None:
                raise EngineError(
                    f"{name} ended with status {process.exit_status()} while the run needed it; "
                    f"the end of {process.log_path}:\n{process.tail()}"
                )


def result_of(ref: ObjectRef, who: str) -> Any:
    """The task's result. What it raised is raised here as it was; its remote traceback goes to the log."""
    try:
        return ray.get(ref)
    except RayTaskError as error:
        logger.info(f"{who} failed:\n{error}")
        raise error.cause from error
    except RayActorError as error:
        raise WorkerDied(f"{who} died: {error}") from error
