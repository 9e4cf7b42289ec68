"""Waiting for Ray tasks without hanging on a dead partner: the first error wins, and a server process that ends is an
error too."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import RayActorError, RayTaskError

from rlkit.orchestration.processes import ServerProcess
from rlkit.types.errors import EngineError, WorkerDied

logger = logging.getLogger(__name__)

POLL_S = 0.5


class Waiter:
    """Waits on behalf of the driver while it keeps an eye on the server processes of the run."""

    def __init__(self) -> None:
        self._watched: dict[ObjectRef, str] = {}
        self._local: dict[str, ServerProcess] = {}

    def watch_tasks(self, tasks: dict[ObjectRef, str]) -> None:
        """Each task ends only when the server process of that name does; its result says how."""
        self._watched.update(tasks)

    def watch_process(self, name: str, process: ServerProcess) -> None:
        """A server process of the driver itself."""
        self._local[name] = process

    def gather(self, refs: Sequence[ObjectRef], *, who: str, on_poll: Callable[[], None] | None = None) -> list[Any]:
        """Results of `refs` in order; `who` names their workers in messages (`training rank`).

        Raises as soon as one of them fails, although its peers may still wait for it in a collective, and as soon as a
        watched process ends. `on_poll` is called about twice a second meanwhile.
        """
        pending: list[ObjectRef] = list(refs)
        while pending:
            ready, _ = ray.wait([*pending, *self._watched], num_returns=1, timeout=POLL_S)
            for ref in ready:
                if ref in self._watched:
                    raise EngineError(f"{self._watched[ref]} ended while the run needed it: {ray.get(ref)}")
                result_of(ref, f"{who} {refs.index(ref)}")
                pending.remove(ref)
            for name, process in self._local.items():
                if process.exit_status() is not None:
                    raise EngineError(
                        f"{name} ended with status {process.exit_status()} while the run needed it; "
                        f"the end of {process.log_path}:\n{process.tail()}"
                    )
            if on_poll is not None:
                on_poll()
        return [ray.get(ref) for ref in refs]


def result_of(ref: ObjectRef, who: str) -> Any:
    """The task's result. What it raised is raised here as it was; its remote traceback goes to the log."""
    try:
        return ray.get(ref)
    except RayTaskError as error:
        logger.info(f"{who} failed:\n{error}")
        raise error.cause from error
    except RayActorError as error:
        raise WorkerDied(f"{who} died: {error}") from error
