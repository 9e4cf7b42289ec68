"""Where the time of a step goes: named wall-clock spans, added up per step and reported as `time/<name>_s`.

Owned by one process and one thread: the driver, the rollout manager and each training rank have their own. Invariants:
- A total is the time during which *at least one* span of that name was open. Two overlapping spans of one name (two
  coroutines that grade at once, or a function that calls itself) count once, so a total never exceeds the wall clock.
- Names are independent of each other: a span inside another counts in both (`log_prob` lies inside `train`). Add up
  only spans that do not contain each other.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum


class SpanName(StrEnum):
    GENERATE = "generate"
    """From the first request of a rollout to its last response; grading of earlier responses overlaps with it."""
    GRADE = "grade"
    """From the last response of a rollout to the last grade: what grading adds to the step."""
    PACK = "pack"
    """Advantages, planning and building micro-batches."""
    LOG_PROB = "log_prob"
    """Old-policy and reference log-probs; inside TRAIN."""
    TRAIN = "train"
    """The trainer's part of a step."""
    SAVE = "save"
    SYNC = "sync"
    """New weights on their way to the engines."""
    SLEEP = "sleep"
    WAKE = "wake"
    TRAINER_SLEEP = "trainer_sleep"
    """The trainer's part of SLEEP, and so on."""
    TRAINER_WAKE = "trainer_wake"
    ENGINE_SLEEP = "engine_sleep"
    ENGINE_WAKE = "engine_wake"
    """Room for weights, before an update."""
    KV_WAKE = "kv_wake"
    """Room for the KV cache, after it."""
    EVALUATE = "evaluate"


class Spans:
    """`with spans("generate"): ...` measures; `spans.drain()` reports the step and starts the next one."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._totals: dict[SpanName, float] = {}
        self._num_open: dict[SpanName, int] = {}
        self._opened_at: dict[SpanName, float] = {}

    @contextmanager
    def __call__(self, name: SpanName | str) -> Iterator[None]:
        """Measure the block, also when it raises. An unknown name is a ValueError."""
        name = SpanName(name)
        depth = self._num_open.get(name, 0)
        if depth == 0:
            self._opened_at[name] = self._clock()
        self._num_open[name] = depth + 1
        try:
            yield
        finally:
            self._num_open[name] -= 1
            if self._num_open[name] == 0:
                self.add(name, self._clock() - self._opened_at[name])

    def add(self, name: SpanName | str, seconds: float) -> None:
        """Count time that was measured elsewhere."""
        name = SpanName(name)
        self._totals[name] = self._totals.get(name, 0.0) + seconds

    def totals(self) -> dict[str, float]:
        """Seconds of the closed spans since the last `drain`, under their metric names. Open spans are not in it."""
        return {f"time/{name}_s": seconds for name, seconds in self._totals.items()}

    def drain(self) -> dict[str, float]:
        """`totals()`, then start again from zero. A span that is open goes on and counts in full where it closes."""
        totals = self.totals()
        self._totals.clear()
        return totals
