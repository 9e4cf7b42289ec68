"""The protocol around a weight push, and sleep and wake of all engines. Called by the session; the push itself is the
channels' work.

Split:      pause (abort) -> wait until idle -> push -> verify version -> flush -> continue
            pause (retract) -> push -> verify version -> continue      (requests wait meanwhile, so nothing is flushed:
            engines are started without a prefix cache then)
Colocated:  engines are asleep and empty -> map weights -> push -> verify version -> map KV cache -> flush

Buckets go out with flush_cache=false: SGLang asserts inside its scheduler that a flush succeeds, so it is asked for
once, at a moment when nothing runs. No cached prefix survives an update.
"""

from collections.abc import Callable, Sequence
from typing import Literal

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
        pause_mode: Literal["abort", "retract"] = "abort",
    ) -> None:
        """`pause_mode`: what happens to running requests when the engines do not sleep."""
        self._timeout_s = timeout_s
        self._calls = EngineCalls(endpoints, timeout_s=timeout_s)
        self._push = push
        self._pause_mode: Literal["abort", "retract"] = pause_mode
        self._engines_sleep = engines_sleep
        self._spans = spans

    @property
    def endpoints(self) -> list[EngineEndpoint]:
        """Where the engines are now."""
        return self._calls.endpoints

    def set_endpoints(self, endpoints: Sequence[EngineEndpoint]) -> None:
        """Where the engines are from now on."""
        self._calls.close()
        self._calls = EngineCalls(endpoints, timeout_s=self._timeout_s)

    def push_to(self, endpoint: EngineEndpoint, push: Callable[[int], PushReport], version: int) -> None:
        """Give one engine its weights before requests reach it; it is awake and idle, and the others go on."""
        calls = EngineCalls([endpoint], timeout_s=self._timeout_s)
        try:
            self._push_and_verify(version, push, calls)
            calls.all(lambda client, _: client.flush_cache(timeout_s=FLUSH_TIMEOUT_S))
        finally:
            calls.close()

    def sleep_restarted(self, endpoints: Sequence[EngineEndpoint]) -> None:
        """Bring engines that have just started to where an update expects them: asleep, when the others are."""
        if self._engines_sleep:
            calls = EngineCalls(endpoints, timeout_s=self._timeout_s)
            try:
                calls.all(lambda client, _: client.release_memory([*KV_TAGS, "weights"]))
            finally:
                calls.close()

    def sleep_engines(self) -> None:
        """Wait until the engines are idle, then free their weights and KV cache."""
        with self._spans(SpanName.SLEEP), self._spans(SpanName.ENGINE_SLEEP):
            self._calls.all(lambda client, _: client.flush_cache(timeout_s=FLUSH_TIMEOUT_S))
            self._calls.all(lambda client, _: client.release_memory([*KV_TAGS, "weights"]))

    def update(self, version: int) -> PushReport:
        """Give every engine the trainer's weights as `version` and make sure of it."""
        if self._engines_sleep:
            with self._spans(SpanName.WAKE), self._spans(SpanName.ENGINE_WAKE):
                self._calls.all(lambda client, _: client.resume_memory(["weights"]))
            report = self._push_and_verify(version, self._push, self._calls)
            with self._spans(SpanName.WAKE), self._spans(SpanName.KV_WAKE):
                self._calls.all(lambda client, _: client.resume_memory(KV_TAGS))
                self._calls.all(lambda client, _: client.flush_cache(timeout_s=FLUSH_TIMEOUT_S))
            return report
        self._calls.all(lambda client, _: client.pause(self._pause_mode))
        if self._pause_mode == "retract":
            report = self._push_and_verify(version, self._push, self._calls)
        else:
            self._calls.all(lambda client, _: client.flush_cache(timeout_s=FLUSH_TIMEOUT_S))
            report = self._push_and_verify(version, self._push, self._calls)
            self._calls.all(lambda client, _: client.flush_cache(timeout_s=FLUSH_TIMEOUT_S))
        self._calls.all(lambda client, _: client.resume())
        return report

    def _push_and_verify(self, version: int, push: Callable[[int], PushReport], calls: EngineCalls) -> PushReport:
        with self._spans(SpanName.SYNC):
            report = push(version)
            infos = calls.all(lambda client, _: client.model_info())
            for endpoint, info in zip(calls.endpoints, infos, strict=True):
                if info.weight_version != version:
                    raise SyncError(
                        f"engine {endpoint.url} reports weights v{info.weight_version} after an update to v{version}"
                    )
            if report.checksums is not None:
                compare_checksums(report.checksums, calls)
        return report

    def close(self) -> None:
        self._calls.close()


def compare_checksums(expected: dict[str, str], calls: EngineCalls) -> None:
    """SyncError unless every tensor that was sent is in every engine, byte for byte."""
    answers = calls.all(lambda client, _: client.weights_checker("checksum"))
    for endpoint, answer in zip(calls.endpoints, answers, strict=True):
        found = engine_checksums(answer)
        different = sorted(name for name, value in expected.items() if found.get(name) != value)
        if different:
            name = different[0]
            raise SyncError(
                f"{len(different)} of {len(expected)} tensors of engine {endpoint.url} differ from the trainer's "
                f"after the update; the first is {name}: trainer {expected[name][:16]}, "
                f"engine {found.get(name, 'absent')[:16]}"
            )


def engine_checksums(answer: dict) -> dict[str, str]:
    """Checksums by tensor name from an answer of `/weights_checker` (one payload a rank; a single-rank engine has
    one)."""
    ranks = answer["ranks"]
    return {name: value for rank in ranks for name, value in rank["checksums"].items()}
