"""The protocol around a weight push, and sleep and wake of all engines. Called by the session; the push itself is the
channels' work.

Split:      pause (abort) -> wait until idle -> push -> flush -> verify version -> continue
Colocated:  engines are asleep and empty -> map weights -> push -> verify version -> map KV cache -> flush

Buckets go out with flush_cache=false: SGLang asserts inside its scheduler that a flush succeeds, so it is asked for
once, at a moment
when nothing runs. No cached prefix survives an update.
"""

from collections.abc import Callable, Sequence

from rlkit.observability.spans import SpanName, Spans
from rlkit.sync.base import PushReport
from rlkit.sync.engine_calls import EngineCalls
from rlkit.types.errors import SyncError
from rlkit.types.ranks import EngineEndpoint

KV_TAGS = ("kv_cache", "cuda_graph")
FLUSH_TIMEOUT_S = 120.0


class WeightUpdater:
    """Brings every engine to one version, or raises SyncError."""

    def __init__(
        self,
        endpoints: Sequence[EngineEndpoint],
        push: Callable[[int], PushReport],
        *,
        engines_sleep: bool,
        timeout_s: float,
        spans: Spans,
    ) -> None:
        self._calls = EngineCalls(endpoints, timeout_s=timeout_s)
        self._push = push
        self._engines_sleep = engines_sleep
        self._spans = spans

    def sleep_engines(self) -> None:
        """Wait until the engines are idle, then free their weights and KV cache."""
        with self._spans(SpanName.SLEEP):
            self._calls.all(lambda client, _: client.flush_cache(timeout_s=FLUSH_TIMEOUT_S))
            self._calls.all(lambda client, _: client.release_memory([*KV_TAGS, "weights"]))

    def update(self, version: int) -> PushReport:
        """Give every engine the trainer's weights as `version` and make sure of it."""
        if self._engines_sleep:
            with self._spans(SpanName.WAKE):
                self._calls.all(lambda client, _: client.resume_memory(["weights"]))
            report = self._push_and_verify(version)
            with self._spans(SpanName.WAKE):
                self._calls.all(lambda client, _: client.resume_memory(KV_TAGS))
                self._calls.all(lambda client, _: client.flush_cache(timeout_s=FLUSH_TIMEOUT_S))
            return report
        self._calls.all(lambda client, _: client.pause("abort"))
        self._calls.all(lambda client, _: client.flush_cache(timeout_s=FLUSH_TIMEOUT_S))
        report = self._push_and_verify(version)
        self._calls.all(lambda client, _: client.flush_cache(timeout_s=FLUSH_TIMEOUT_S))
        self._calls.all(lambda client, _: client.resume())
        return report

    def _push_and_verify(self, version: int) -> PushReport:
        with self._spans(SpanName.SYNC):
            report = self._push(version)
            infos = self._calls.all(lambda client, _: client.model_info())
            for endpoint, info in zip(self._calls.endpoints, infos, strict=True):
                if info.weight_version != version:
                    raise SyncError(
                        f"engine {endpoint.url} reports weights v{info.weight_version} after an update to v{version}"
                    )
            if report.checksums is not None:
                self._compare(report.checksums)
        return report

    def _compare(self, expected: dict[str, str]) -> None:
        """Every tensor that was sent must be in every engine, byte for byte."""
        answers = self._calls.all(lambda client, _: client.weights_checker("checksum"))
        for endpoint, answer in zip(self._calls.endpoints, answers, strict=True):
            found = engine_checksums(answer)
            different = sorted(name for name, value in expected.items() if found.get(name) != value)
            if different:
                name = different[0]
                raise SyncError(
                    f"{len(different)} of {len(expected)} tensors of engine {endpoint.url} differ from the trainer's "
                    f"after the update; the first is {name}: trainer {expected[name][:16]}, "
                    f"engine {found.get(name, 'absent')[:16]}"
                )

    def close(self) -> None:
        self._calls.close()


def engine_checksums(answer: dict) -> dict[str, str]:
    """Checksums by tensor name from an answer of `/weights_checker` (one payload a rank; a single-rank engine has
    one)."""
    ranks = answer["ranks"]
    return {name: value for rank in ranks for name, value in rank["checksums"].items()}
