"""Messages between a process and its grader processes: pickles with a length in front, over pipes. Called by
`worker.py` and `process.py`.
"""

import os
import pickle
import struct
from dataclasses import dataclass
from typing import Any, Literal

Limit = Literal["wall", "processor"]
"""Which clock a time limit goes by."""

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSetup:
    """What a grader process is for, and its limits."""

    custom_path: str | None
    """Function to call; None makes it an algebra process."""
    wall_limit_s: float
    """One grading may take so long; then the executor is killed by the kernel and forked anew."""
    cpu_limit_s: float | None
    """The same in processor time, which does not depend on how busy the machine is."""
    memory_limit_bytes: int | None
    """Address space of the process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """The process answers requests from now on."""

    is_async: bool
    """The function is a coroutine: the process works on several requests at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """The process cannot start; `message` is for the user."""

    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Died:
    """The executor was killed or crashed; its requests are lost, the next ones are answered."""

    limit: Limit | None
    """The time limit that it ran into."""
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    request_id: int
    arguments: tuple[Any, ...]
    """(answer, label) for algebra; (response, label, metadata) for a custom function."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """Outcome of one request; exactly one of the three is set, unless the value itself is None."""

    request_id: int
    value: Any = None
    error: str | None = None
    """The function raised; its traceback."""
    timed_out: bool = False


Message = Ready | Failed | Died | Request | Reply | WorkerSetup


class UnsendableError(Exception):
    """An argument cannot be pickled."""


def send(fd: int, message: Message) -> None:
    """Write one message, or nothing when it cannot be pickled (UnsendableError). One thread at a time."""
    try:
        body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # objects decide themselves what they raise
        raise UnsendableError(f"{type(error).__name__}: {error}") from error
    view = memoryview(_LENGTH.pack(len(body)) + body)
    while view:
        view = view[os.write(fd, view) :]


def receive(fd: int) -> Message | None:
    """Read one message, unbuffered, so that nothing is lost when the reader dies; None at the end of the stream."""
    head = _read_exactly(fd, _LENGTH.size)
    if head is None:
        return None
    body = _read_exactly(fd, _LENGTH.unpack(head)[0])
    return None if body is None else pickle.loads(body)


def _read_exactly(fd: int, size: int) -> bytes | None:
    parts: list[bytes] = []
    while size:
        part = os.read(fd, min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
