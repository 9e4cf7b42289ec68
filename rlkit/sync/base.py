"""What a weight channel is, and what one push reports. Implementations: `ipc.py`, `group.py`, `disk.py`; chosen in
`factory.py`.

A channel lives in every training rank. The engine side needs no code of ours beyond the engine's own HTTP endpoints.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rlkit.dist.collectives import barrier
from rlkit.types.weights import WeightBucket, WeightSource, tensor_checksum


@dataclass(frozen=True, kw_only=True, slots=True)
class PushReport:
    """One rank's account of one push."""

    version: int
    num_bytes: int
    """Bytes of one full copy of the weights."""
    num_buckets: int
    seconds: float
    """The whole push on this rank."""
    prepare_s: float
    """Of that, time spent waiting for buckets: copying from the host, casting, gathering. What overlaps with engines
    is not in it."""
    send_s: float
    """Of that, time in calls to engines and in broadcasts."""
    checksums: dict[str, str] | None
    """Checksum by tensor name where asked for (rank 0 only)."""


class WeightChannel(Protocol):
    """Carries all weights of a trainer to all engines."""

    def push(self, source: WeightSource, version: int) -> PushReport:
        """Send everything, stamped `version`. Collective over the training ranks; returns when the engines have
        acknowledged."""
        ...

    def close(self) -> None:
        """Free groups, buffers and connections."""
        ...


def push_buckets(
    source: WeightSource,
    send: Callable[[WeightBucket], None],
    *,
    version: int,
    max_bytes: int,
    with_checksums: bool,
) -> PushReport:
    """Hand every bucket to `send`, then wait for all ranks. Collective: call on every rank, also on those that send
    nothing."""
    start = time.perf_counter()
    prepare_s = send_s = 0.0
    num_bytes = num_buckets = 0
    checksums: dict[str, str] | None = {} if with_checksums else None
    asked_at = start
    for bucket in source.buckets(max_bytes):
        ready_at = time.perf_counter()
        send(bucket)
        prepare_s += ready_at - asked_at
        asked_at = time.perf_counter()
        send_s += asked_at - ready_at
        num_bytes += bucket.flat.numel()
        num_buckets += 1
        if checksums is not None:
            checksums.update((name, tensor_checksum(tensor)) for name, tensor in bucket.tensors())
            asked_at = time.perf_counter()
    barrier()
    return PushReport(
        version=version,
        num_bytes=num_bytes,
        num_buckets=num_buckets,
        seconds=time.perf_counter() - start,
        prepare_s=prepare_s,
        send_s=send_s,
        checksums=checksums,
    )
