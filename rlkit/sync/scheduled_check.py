"""`--check-weight-update-interval`: the proof that engines hold the trainer's weights, at the first push (a start, a
resume, a restarted engine) and then at every N-th. Made in `factory.py`.
"""

from dataclasses import replace

from rlkit.sync.base import PushReport, WeightChannel, push_buckets
from rlkit.types.weights import WeightSource


class ChecksumPass:
    """Reads the weights a second time after a push of `inner`, for the checksums that the updater compares."""

    def __init__(self, inner: WeightChannel, *, max_bytes: int, is_main: bool) -> None:
        self._inner = inner
        self._max_bytes = max_bytes
        self._is_main = is_main

    def push(self, source: WeightSource, version: int) -> PushReport:
        """See `WeightChannel`."""
        report = self._inner.push(source, version)
        again = push_buckets(
            source, lambda _: None, version=version, max_bytes=self._max_bytes, with_checksums=self._is_main
        )
        return replace(report, checksums=again.checksums)

    def close(self) -> None:
        self._inner.close()


class ScheduledCheck:
    """`checked` at the pushes 0, N, 2N, ... of this channel, `plain` at all others. `checked` owns `plain`."""

    def __init__(self, plain: WeightChannel, checked: WeightChannel, *, interval: int) -> None:
        self._plain = plain
        self._checked = checked
        self._interval = interval
        self._num_pushes = 0

    def push(self, source: WeightSource, version: int) -> PushReport:
        """See `WeightChannel`. All ranks count alike."""
        channel = self._checked if self._num_pushes % self._interval == 0 else self._plain
        self._num_pushes += 1
        return channel.push(source, version)

    def close(self) -> None:
        self._checked.close()
