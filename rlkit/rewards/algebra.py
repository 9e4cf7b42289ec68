"""Algebra for `grade`: a few processes shared by all threads of this one, with a hard limit on every call.

They start when first needed. Verdicts are remembered, because the responses of a group often share their answer, and
one that ran into its limit must not cost it again.
"""

import concurrent.futures
import logging
import os
import threading
import time
from collections import OrderedDict, deque
from dataclasses import dataclass

from rlkit.rewards.process import GraderProcess, WorkerLostError
from rlkit.rewards.wire import WorkerSetup
from rlkit.types.errors import RewardError

logger = logging.getLogger(__name__)

CPU_LIMIT_S = 2.0
WALL_LIMIT_S = 6.0  # far above the processor time, so that a busy machine does not change verdicts
MEMORY_LIMIT_BYTES = 2 << 30
CALL_LIMIT_S = 9.0
"""The comparisons of one call of `grade`. Waiting for others does not count: how many threads grade at the same time
must not decide what an answer is worth."""
QUEUE_LIMIT_S = 120.0
"""The wait of one call for processes that are busy or start. After it there is an error, never a reward."""

_GRACE_S = 1.0
_MAX_REMEMBERED = 20_000
_MAX_PROCESSES = max(4, min(8, os.cpu_count() or 1))

Pair = tuple[str, str]
Turn = concurrent.futures.Future[GraderProcess | None]


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


@dataclass(slots=True)
class Patience:
    """What is left to one call of `grade`, in seconds."""

    waiting_s: float
    """For processes that are busy with other calls, or that start."""
    working_s: float
    """For its own comparisons."""


class AlgebraService:
    """Blocking comparisons from any number of threads, served in the order in which they came."""

    def __init__(self) -> None:
        self._memory = VerdictMemory()
        self._lock = threading.Lock()
        self._idle: list[GraderProcess] = []
        self._waiting: deque[Turn] = deque()
        self._num_processes = 0

    def any_equal(self, pairs: tuple[Pair, ...]) -> bool:
        """Whether algebra finds one of the (answer, label) pairs equal. False also where the comparisons themselves ran
        into their limits; RewardError where other calls left no process free for `QUEUE_LIMIT_S`.
        """
        patience = Patience(waiting_s=QUEUE_LIMIT_S, working_s=CALL_LIMIT_S)
        return any(self._equal(pair, patience) for pair in pairs)

    def _equal(self, pair: Pair, patience: Patience) -> bool:
        known = self._memory.get(pair)
        if known is not None:
            return known
        for attempt in range(2):  # once more if the process turned out to be gone
            process = self._acquire(patience)
            try:
                verdict = _ask(process, pair, patience)
            except ProcessesBusyError:
                raise
            except RewardError:
                if attempt:
                    raise
                continue
            finally:
                self._release(process)
            if verdict is not None:
                if verdict.is_final:
                    self._memory.put(pair, verdict.is_equal)
                return verdict.is_equal
        logger.warning("two algebra processes were lost over one answer, which scores 0.0: %.200r", pair)
        return False

    def _acquire(self, patience: Patience) -> GraderProcess:
        """A process for this thread alone; ProcessesBusyError when the wait takes too long."""
        while True:
            with self._lock:
                process = self._idle.pop() if self._idle else None
                if process is not None and process.is_lost:
                    self._num_processes -= 1
                    continue
                may_start = process is None and self._num_processes < _MAX_PROCESSES
                self._num_processes += may_start
                turn = Turn()
                if process is None and not may_start:
                    self._waiting.append(turn)
            if process is None:
                process = self._start() if may_start else self._wait_for(turn, patience)
            if process is not None:
                return process

    def _start(self) -> GraderProcess:
        try:
            return GraderProcess(algebra_setup(), quiet=True)
        except BaseException:
            with self._lock:
                self._num_processes -= 1
                self._wake_next(None)
            raise

    def _wait_for(self, turn: Turn, patience: Patience) -> GraderProcess | None:
        """The process that `_release` hands over; None where there is room for a new one."""
        began = time.monotonic()
        try:
            return turn.result(timeout=max(0.0, patience.waiting_s))
        except BaseException as error:
            with self._lock:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                elif not self._wake_next(process := turn.result(timeout=0)) and process is not None:
                    self._idle.append(process)
            if isinstance(error, concurrent.futures.TimeoutError):
                raise ProcessesBusyError from None
            raise
        finally:
            patience.waiting_s -= time.monotonic() - began

    def _release(self, process: GraderProcess) -> None:
        with self._lock:
            if process.is_lost:
                self._num_processes -= 1
                self._wake_next(None)
            elif not self._wake_next(process):
                self._idle.append(process)

    def _wake_next(self, process: GraderProcess | None) -> bool:
        """Give the one that waits longest a process, or the room for one. Called with the lock held."""
        if not self._waiting:
            return False
        self._waiting.popleft().set_result(process)
        return True


class ProcessesBusyError(RewardError):
    """Nothing is known about the answer: this call never got a process to ask."""

    def __init__(self) -> None:
        super().__init__(
            f"no algebra process was free for {QUEUE_LIMIT_S:g} s, because other threads grade too; "
            "grade from fewer threads or use GraderPool"
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one process found."""

    is_equal: bool
    is_final: bool = True
    """False where the wall limit cut it short: on a less busy machine the answer may be another."""


def _ask(process: GraderProcess, pair: Pair, patience: Patience) -> Verdict | None:
    """Verdict of one process: different where it ran into its limits, None where the process was lost.

    RewardError when the process cannot start, ProcessesBusyError when it takes too long to.
    """
    began = time.monotonic()
    try:
        process.ready.result(timeout=max(0.0, patience.waiting_s))
    except concurrent.futures.TimeoutError:
        raise ProcessesBusyError from None
    finally:
        patience.waiting_s -= time.monotonic() - began
    began = time.monotonic()
    try:
        limit = max(0.0, min(WALL_LIMIT_S + _GRACE_S, patience.working_s))
        return Verdict(process.submit(*pair).result(timeout=limit).value is True)
    except WorkerLostError as error:
        if process.is_lost and error.limit is None:
            return None
        return Verdict(False, is_final=error.limit != "wall")
    except concurrent.futures.TimeoutError:
        process.kill()  # it is still at work on this pair, whose fate must not be taken for that of the next one
        return Verdict(False, is_final=False)
    finally:
        patience.working_s -= time.monotonic() - began
