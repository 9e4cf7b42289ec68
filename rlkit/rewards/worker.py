"""The program of a grader process: grades what arrives on its input until that closes. Started by `process.py`, never
imported by it.

A supervisor loads what is slow to load and forks an executor, which does the work. When a grading takes too long the
kernel kills the executor (interval timers with their default action, which also stop code that never returns to
Python), and the supervisor forks the next one within milliseconds. Both end when the pipe from the parent closes, so
nothing outlives a parent that was killed.
"""

import asyncio
import inspect
import io
import os
import resource
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from rlkit.rewards.custom import is_async, load_custom_function, plain_value
from rlkit.rewards.wire import Died, Failed, Limit, Ready, Reply, Request, WorkerSetup, receive, send
from rlkit.types.errors import ConfigError

Handler = Callable[..., Any]

_LOOK_EVERY_MS = 1000  # in case the executor left children that keep its pipe open
_FAREWELL_S = 0.05
_RECYCLED = 3  # exit code of an executor that makes room for a fresh one
LIMIT_OF_SIGNAL: dict[str, Limit] = {"SIGALRM": "wall", "SIGPROF": "processor"}
_REQUESTS_PER_EXECUTOR = 5000  # sympy's caches only grow


def main() -> None:
    """Serve the protocol of `wire.py` on the process's original input and output."""
    requests, replies = _claim_pipes()
    setup = receive(requests)
    if not isinstance(setup, WorkerSetup):
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it closes the pipe
    try:
        handler = None if setup.custom_path else _load_algebra()
    except ImportError as error:
        send(replies, Failed(message=f"answers cannot be compared by algebra: {error}; install math-verify"))
        return
    while True:
        status = _run_until_it_ends(setup, handler, requests, replies)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) != _RECYCLED:
            return
        if os.WIFSIGNALED(status):
            name = signal.Signals(os.WTERMSIG(status)).name
            limit = LIMIT_OF_SIGNAL.get(name)
            send(replies, Died(limit=limit, reason=f"{limit} time limit" if limit else f"killed by {name}"))


def _claim_pipes() -> tuple[int, int]:
    """The protocol's two ends; code that prints or reads standard input cannot disturb them any more."""
    requests, replies = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # an executor never gets to flush it at exit
    return requests, replies


def _load_algebra() -> Handler:
    from rlkit.rewards.symbolic import symbolic_equal, warm_up  # here: sympy is for algebra processes only

    warm_up()

    def compare(answer: str, label: str) -> bool:
        try:
            return symbolic_equal(answer, label)
        except Exception:  # parser and algebra raise anything on nonsense, MemoryError included; nonsense is not equal
            return False

    return compare


def _run_until_it_ends(setup: WorkerSetup, handler: Handler | None, requests: int, replies: int) -> int:
    """Fork an executor and return its wait status. When the parent's end of `requests` closes, all end with it."""
    life_read, life_write = os.pipe()  # closes when the executor is gone, whatever ended it
    pid = os.fork()
    if pid == 0:
        os.close(life_read)
        _run_executor(setup, handler, requests, replies)
    os.close(life_write)
    poll = select.poll()
    poll.register(requests, 0)  # hang-ups are always reported
    poll.register(life_read, 0)
    try:
        while True:
            hung_up = [fd for fd, _ in poll.poll(_LOOK_EVERY_MS)]
            if requests in hung_up:
                # An idle executor sees it too and leaves; one in the middle of a grading has nobody to answer to. The
                # process group is this supervisor, the executor, and whatever a reward function started.
                time.sleep(_FAREWELL_S)
                os.killpg(0, signal.SIGKILL)
            ended, status = os.waitpid(pid, os.WNOHANG if life_read not in hung_up else 0)
            if ended:
                return status
    finally:
        os.close(life_read)


def _run_executor(setup: WorkerSetup, handler: Handler | None, requests: int, replies: int) -> None:
    code = 1
    try:
        if setup.memory_limit_bytes is not None:
            _, hard = resource.getrlimit(resource.RLIMIT_AS)
            limit = setup.memory_limit_bytes if hard == resource.RLIM_INFINITY else min(hard, setup.memory_limit_bytes)
            resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if handler is None:
            assert setup.custom_path is not None
            try:
                handler = load_custom_function(setup.custom_path)
            except ConfigError as error:
                send(replies, Failed(message=str(error)))
                return
        send(replies, Ready(is_async=is_async(handler)))
        if is_async(handler):
            asyncio.run(_serve_concurrently(setup, handler, requests, replies))
            code = 0
        else:
            code = _serve_in_turn(setup, handler, requests, replies)
    except BrokenPipeError:  # the parent is gone
        code = 0
    finally:
        os._exit(code)  # never back into the supervisor's stack


def _serve_in_turn(setup: WorkerSetup, handler: Handler, requests: int, replies: int) -> int:
    served = 0
    while setup.custom_path is not None or served < _REQUESTS_PER_EXECUTOR:
        served += 1
        request = receive(requests)
        if request is None:
            return 0
        assert isinstance(request, Request)
        _set_timers(setup.wall_limit_s, setup.cpu_limit_s)
        reply = _answer(handler, request)
        _set_timers(0.0, 0.0)
        send(replies, reply)
    return _RECYCLED


def _set_timers(wall_s: float, cpu_s: float | None) -> None:
    for timer, number, seconds in (
        (signal.ITIMER_REAL, signal.SIGALRM, wall_s),
        (signal.ITIMER_PROF, signal.SIGPROF, cpu_s),
    ):
        if seconds is not None:
            if seconds > 0:
                signal.signal(number, signal.SIG_DFL)  # the default is death, and needs no cooperation
            signal.setitimer(timer, seconds)


def _answer(handler: Handler, request: Request) -> Reply:
    try:
        value = handler(*request.arguments)
        if inspect.isawaitable(value):
            value = asyncio.run(_wait_for(value))
        return Reply(request_id=request.request_id, value=plain_value(value))
    except Exception:  # the user's function; the parent counts and reports it
        return Reply(request_id=request.request_id, error=traceback.format_exc())


async def _wait_for(awaitable: Any) -> Any:
    return await awaitable


async def _serve_concurrently(setup: WorkerSetup, handler: Handler, requests: int, replies: int) -> None:
    """Coroutine functions wait for others most of the time: requests run side by side on one loop, each under its own
    limit.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[Request | None] = asyncio.Queue()

    def read() -> None:
        while True:
            request = receive(requests)
            assert request is None or isinstance(request, Request)
            loop.call_soon_threadsafe(queue.put_nowait, request)
            if request is None:
                return

    async def answer(request: Request) -> None:
        try:
            value = await asyncio.wait_for(handler(*request.arguments), setup.wall_limit_s)
            reply = Reply(request_id=request.request_id, value=plain_value(value))
        except TimeoutError:
            reply = Reply(request_id=request.request_id, timed_out=True)
        except Exception:  # as in _answer
            reply = Reply(request_id=request.request_id, error=traceback.format_exc())
        send(replies, reply)

    threading.Thread(target=read, daemon=True).start()
    tasks: set[asyncio.Task[None]] = set()
    while (request := await queue.get()) is not None:
        task = loop.create_task(answer(request))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
