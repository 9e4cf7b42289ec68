"""Who has the GPUs. Colocated, engines and trainer take turns (`SharedGpus`); split, each has its own (`SplitGpus`)."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from rlkit.observability.spans import SpanName, Spans
from rlkit.orchestration.train_workers import TrainGroup
from rlkit.sync.updater import WeightUpdater


class Phases(Protocol):
    """The two phases of a step. Between them lies the weight update, which `WeightUpdater` runs with the trainer
    asleep or awake."""

    def generating(self) -> AbstractContextManager[None]: ...

    def training(self) -> AbstractContextManager[None]: ...


class SharedGpus:
    """Trainer asleep and engines awake while generating; the other way round while training."""

    def __init__(self, actor: TrainGroup, updater: WeightUpdater, spans: Spans) -> None:
        self._actor = actor
        self._updater = updater
        self._spans = spans

    @contextmanager
    def generating(self) -> Iterator[None]:
        yield  # the weight update left the engines awake

    @contextmanager
    def training(self) -> Iterator[None]:
        self._updater.sleep_engines()
        with self._spans(SpanName.WAKE), self._spans(SpanName.TRAINER_WAKE):
            self._actor.wake_up()
        yield
        # not in a finally: after a failure the session tears down, never goes on
        with self._spans(SpanName.SLEEP), self._spans(SpanName.TRAINER_SLEEP):
            self._actor.sleep()


class SplitGpus:
    """Nobody has to make room."""

    def generating(self) -> AbstractContextManager[None]:
        return nullcontext()

    def training(self) -> AbstractContextManager[None]:
        return nullcontext()
