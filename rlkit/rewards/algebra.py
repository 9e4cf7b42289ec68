"""Algebra for `grade`: a few processes shared by all threads of this one, with a hard limit on every call.

They start when first needed. Verdicts are remembered, because the responses of a group often share their answer, and
one that ran into its limit must not cost it again.
"""

import concurrent.futures
import logging
import os
import queue
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass

from rlkit.rewards.process import GraderProcess, WorkerLostError
from rlkit.rewards.wire import WorkerSetup
from rlkit.types.errors import RewardError

logger = logging.getLogger(__name__)

CPU_LIMIT_S = 2.0
WALL_LIMIT_S = 6.0  # far above the processor time, so that a busy machine does not change verdicts
MEMORY_LIMIT_BYTES = 2 << 30
CALL_LIMIT_S = 9.0
"""A whole call of `grade`, including the wait for a process and its start."""

_GRACE_S = 1.0
_MAX_REMEMBERED = 20_000
_MAX_PROCESSES = max(4, min(8, os.cpu_count() or 1))

Pair = tuple[str, str]


def algebra_setup(wall_limit_s: float = WALL_LIMIT_S) -> WorkerSetup:
    return WorkerSetup(
        custom_path=None,
        wall_limit_s=wall_limit_s,
        cpu_limit_s=min(CPU_LIMIT_S, wall_limit_s),
        memory_limit_bytes=MEMORY_LIMIT_BYTES,
    )


class VerdictMemory:
    """The newest verdicts by (answer, label). Safe from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._verdicts: OrderedDict[Pair, bool] = OrderedDict()

    def get(self, pair: Pair) -> bool | None:
        with self._lock:
            verdict = self._verdicts.get(pair)
            if verdict is not None:
                self._verdicts.move_to_end(pair)
            return verdict

    def put(self, pair: Pair, verdict: bool) -> None:
        with self._lock:
            self._verdicts[pair] = verdict
            if len(self._verdicts) > _MAX_REMEMBERED:
                self._verdicts.popitem(last=False)


class AlgebraService:
    """Blocking comparisons from any number of threads."""

    def __init__(self) -> None:
        self._memory = VerdictMemory()
        self._lock = threading.Lock()
        self._idle: queue.LifoQueue[GraderProcess] = queue.LifoQueue()
        self._num_processes = 0

    def any_equal(self, pairs: tuple[Pair, ...]) -> bool:
        """Whether algebra finds one of the (answer, label) pairs equal. False also where it gave up: after its limits,
        or under overload.
        """
        deadline = time.monotonic() + CALL_LIMIT_S
        return any(self._equal(pair, deadline) for pair in pairs)

    def _equal(self, pair: Pair, deadline: float) -> bool:
        known = self._memory.get(pair)
        if known is not None:
            return known
        for attempt in range(2):  # once more if the process turned out to be gone
            process = self._acquire(deadline)
            if process is None:
                break
            try:
                verdict = _ask(process, pair, deadline)
            except RewardError:
                if attempt:
                    raise
                continue
            finally:
                self._idle.put(process)
            if verdict is not None:
                if verdict.is_final:
                    self._memory.put(pair, verdict.is_equal)
                return verdict.is_equal
        logger.warning(
            "grading gave up after %.0f s without a free algebra process and scored 0.0; "
            "grade from fewer threads or use GraderPool",
            CALL_LIMIT_S,
        )
        return False

    def _acquire(self, deadline: float) -> GraderProcess | None:
        while time.monotonic() < deadline:
            process = self._idle_or_new(deadline)
            if process is None:
                return None
            if not process.is_lost:
                return process
            with self._lock:
                self._num_processes -= 1
        return None

    def _idle_or_new(self, deadline: float) -> GraderProcess | None:
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            pass
        with self._lock:
            may_start = self._num_processes < _MAX_PROCESSES
            self._num_processes += may_start
        if may_start:
            return GraderProcess(algebra_setup(), quiet=True)
        try:
            return self._idle.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one process found."""

    is_equal: bool
    is_final: bool = True
    """False where the wall limit cut it short: on a less busy machine the answer may be another."""


def _ask(process: GraderProcess, pair: Pair, deadline: float) -> Verdict | None:
    """Verdict of one process: different where it ran into its limits, None where there was no time for an answer.

    RewardError when the process cannot start.
    """
    try:
        process.ready.result(timeout=max(0.0, deadline - time.monotonic()))
    except concurrent.futures.TimeoutError:
        return None
    limit = WALL_LIMIT_S + _GRACE_S
    left = deadline - time.monotonic()
    try:
        reply = process.submit(*pair).result(timeout=max(0.0, min(limit, left)))
        return Verdict(reply.value is True)
    except WorkerLostError as error:
        if process.is_lost and error.limit is None:
            return None
        return Verdict(False, is_final=error.limit != "wall")
    except concurrent.futures.TimeoutError:
        process.kill()  # it is still at work on this pair, whose fate must not be taken for that of the next one
        return None if left < limit else Verdict(False, is_final=False)
