"""How busy the engines are, as the rollout manager sees it: requests in flight over time. Called by `generator.py`."""

import time
from collections.abc import Callable
from types import TracebackType

from rlkit.types.ranks import MetricSet


class EngineUse:
    """`with use:` around every request; `use.drain()` reports the time since the last call.

    A request counts from when it is sent until its answer is there; one that a weight update holds back counts, too.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._num_running = 0
        self._began: float | None = None
        """None until the first request: nothing is asked of the engines while a run starts."""
        self._seen = 0.0
        self._idle_s = 0.0
        self._request_s = 0.0

    def __enter__(self) -> None:
        self._look()
        self._num_running += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._look()
        self._num_running -= 1

    def _look(self) -> None:
        """Add up what has passed since the last look."""
        now = self._clock()
        if self._began is None:
            self._began = self._seen = now
        passed, self._seen = now - self._seen, now
        self._request_s += passed * self._num_running
        if self._num_running == 0:
            self._idle_s += passed

    def drain(self) -> MetricSet:
        """`bubble/engines`, the share of time without any request, and `rollout/requests_in_flight`, their mean number.
        Empty where no time has passed."""
        if self._began is None:
            return {}
        self._look()
        began, self._began = self._began, self._seen
        window_s = self._seen - began
        idle_s, request_s = self._idle_s, self._request_s
        self._idle_s = self._request_s = 0.0
        if window_s <= 0.0:
            return {}
        return {"bubble/engines": idle_s / window_s, "rollout/requests_in_flight": request_s / window_s}
