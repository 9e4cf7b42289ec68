"""A grader process seen from its parent: start, submit from any thread, replace, close. Used by `algebra.py` and
`pool.py`.

A thread reads the replies and completes futures, so that threads and event loops can both wait. Nothing here imports
multiprocessing: the child is a plain Python program that inherits neither the parent's modules nor its threads.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from concurrent.futures import Future, InvalidStateError
from typing import IO, Any

from rlkit.rewards.wire import Died, Failed, Limit, Ready, Reply, Request, WorkerSetup, receive, send
from rlkit.types.errors import RewardError

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.stdin.buffer.raw.readline()); "
    "from rlkit.rewards.worker import main; main()"
)
_TITLE = "rlkit-grader"  # an argument that shows in `ps`
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_CLOSE_WAIT_S = 2.0


class WorkerLostError(Exception):
    """The request died with its executor; `limit` tells a time limit from a crash."""

    def __init__(self, reason: str, *, limit: Limit | None = None) -> None:
        super().__init__(reason)
        self.limit: Limit | None = limit


class GraderProcess:
    """One supervisor with its executor. Every method may be called from any thread."""

    def __init__(self, setup: WorkerSetup, *, quiet: bool) -> None:
        """Start the process and return at once; `ready` tells when it serves. `quiet` drops what it writes to standard
        error.
        """
        self._lock = threading.Lock()
        self._pending: dict[int, Future[Reply]] = {}
        self._next_id = 0
        self._ready: Future[Ready] = Future()
        self._is_lost = False
        self._popen = subprocess.Popen(
            [sys.executable, "-c", _BOOT, _TITLE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else None,
            env=_environment(),
            start_new_session=True,
            bufsize=0,
        )
        assert self._popen.stdin is not None and self._popen.stdout is not None
        self._requests = self._popen.stdin.fileno()
        # Ends the process with the object and, through finalize's own atexit hook, with the interpreter.
        self._end = weakref.finalize(self, _end_process, self._popen)
        _close_in_forks(self)
        try:
            path = [os.getcwd() if entry == "" else entry for entry in sys.path]
            os.write(self._requests, json.dumps(path).encode() + b"\n")
            send(self._requests, setup)
        except BrokenPipeError:
            self._lose("the process ended while it started")
        reader = threading.Thread(
            target=_read_replies, args=(weakref.ref(self), self._popen.stdout), daemon=True, name=_TITLE
        )
        reader.start()

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def is_lost(self) -> bool:
        """The process is gone for good; make another one."""
        return self._is_lost

    @property
    def ready(self) -> "Future[Ready]":
        """Completes when the process serves: at its start, and again after each loss of its executor. RewardError when
        it never will.
        """
        with self._lock:
            return self._ready

    def submit(self, *arguments: Any) -> "Future[Reply]":
        """Send one request. The future holds the reply or WorkerLostError; UnsendableError is raised here."""
        future: Future[Reply] = Future()
        with self._lock:
            if self._is_lost:
                raise WorkerLostError("the grader process is gone")
            self._next_id += 1
            request_id = self._next_id
            self._pending[request_id] = future
            try:
                send(self._requests, Request(request_id=request_id, arguments=arguments))
            except BrokenPipeError:
                self._pending.pop(request_id)
                raise WorkerLostError("the grader process is gone") from None
            except BaseException:
                self._pending.pop(request_id)
                raise
        return future

    def kill(self) -> None:
        """End supervisor and executor at once; pending requests fail as lost."""
        _kill_group(self._popen.pid)  # first, so that a write to it cannot hang and keep the lock
        self._lose("killed by its parent")
        self._end()

    def close(self) -> None:
        """Let the process end: by closing its input, and by force after two seconds."""
        self._lose("closed")
        self._end()

    def _forget_in_fork(self) -> None:
        """A forked copy of the parent must not keep the pipes open: the process would outlive the real parent."""
        self._end.detach()
        self._is_lost = True
        for stream in (self._popen.stdin, self._popen.stdout):
            if stream is not None:
                stream.close()
        self._popen.returncode = 0  # not this process's child

    def _handle(self, message: object) -> None:
        match message:
            case Ready():
                _complete(self.ready, message)
            case Reply():
                with self._lock:
                    future = self._pending.pop(message.request_id, None)
                if future is not None:
                    _complete(future, message)
            case Died():
                self._fail_pending(WorkerLostError(message.reason, limit=message.limit))
                if not self.ready.done():
                    self._lose(f"the process crashed while it started: {message.reason}")
                    _kill_group(self._popen.pid)
                else:
                    with self._lock:
                        self._ready = Future()
            case Failed():
                self._lose(message.message)
            case _:
                raise AssertionError(f"unexpected message {message!r}")

    def _lose(self, reason: str) -> None:
        with self._lock:
            self._is_lost = True
            ready = self._ready
        if not ready.done():
            _fail(ready, RewardError(reason))
        self._fail_pending(WorkerLostError(reason))

    def _fail_pending(self, error: WorkerLostError) -> None:
        with self._lock:
            pending, self._pending = list(self._pending.values()), {}
        for future in pending:
            _fail(future, error)


def _read_replies(reference: "weakref.ref[GraderProcess]", stream: IO[bytes]) -> None:
    """Body of the reader thread; owns the stream. Holds the object only while it handles a message, so that dropping it
    ends both.
    """
    with stream:
        while True:
            message = receive(stream.fileno())
            process = reference()
            if process is None:
                return
            if message is None:
                process._lose("the grader process ended")
                return
            process._handle(message)
            del process


def _complete(future: "Future[Any]", value: Any) -> None:
    try:
        future.set_result(value)
    except InvalidStateError:  # the waiter gave up and cancelled it
        return


def _fail(future: "Future[Any]", error: Exception) -> None:
    try:
        future.set_exception(error)
    except InvalidStateError:
        return


def _environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONHASHSEED": "0",  # sympy orders by hash in places; the same input shall take the same path
        **dict.fromkeys(_THREAD_VARIABLES, "1"),
    }


def _close_in_forks(process: GraderProcess) -> None:
    reference = weakref.ref(process)

    def forget() -> None:
        if (alive := reference()) is not None and not alive.is_lost:
            alive._forget_in_fork()

    os.register_at_fork(after_in_child=forget)


def _end_process(popen: "subprocess.Popen[bytes]") -> None:
    assert popen.stdin is not None
    popen.stdin.close()
    try:
        popen.wait(_CLOSE_WAIT_S)
    except subprocess.TimeoutExpired:
        _kill_group(popen.pid)
        popen.wait()


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
