"""Who the driver waits for, since when, and when anything last moved: read by the watchdog and by error messages."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """One thing that is being waited for."""

    whom: Callable[[], str]
    """Asked when needed: those that have not answered yet."""
    what: str
    since: float
    """On the clock of the registry."""


class Waits:
    """Open waits of one process, and the time of the last progress. Safe to use from several threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[int, Wait] = {}
        self._next = 0
        self._last_progress = clock()

    @contextmanager
    def waiting(self, whom: str | Callable[[], str], what: str) -> Iterator[None]:
        """Beginning and end of a wait both are progress."""
        wait = Wait(whom=whom if callable(whom) else lambda: whom, what=what, since=self._clock())
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._open[number] = wait
            self._last_progress = self._clock()
        try:
            yield
        finally:
            with self._lock:
                del self._open[number]
                self._last_progress = self._clock()

    def progress(self) -> None:
        """Something that is waited for has moved."""
        with self._lock:
            self._last_progress = self._clock()

    @property
    def idle_s(self) -> float:
        """Seconds since the last progress; 0 when nothing is waited for."""
        with self._lock:
            return self._clock() - self._last_progress if self._open else 0.0

    def describe(self) -> list[str]:
        """One sentence for each open wait, the outermost first."""
        with self._lock:
            now, waits = self._clock(), list(self._open.values())
        return [f"the driver waits for {wait.whom()}: {wait.what}, since {now - wait.since:.0f} s" for wait in waits]
