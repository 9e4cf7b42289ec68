"""The trainer's half of a weight update against a running embedded engine: every channel, and the exported checkpoint,
give the same weights."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_process import RunningEngine

from rlkit.backends.fsdp.backend import FsdpBackend
from rlkit.config.schema import ModelConfig, RunConfig
from rlkit.observability.spans import Spans
from rlkit.sync.base import PushReport, WeightChannel
from rlkit.sync.disk import DiskChannel
from rlkit.sync.engine_calls import EngineCalls
from rlkit.sync.group import GroupChannel
from rlkit.sync.ipc import IpcChannel
from rlkit.sync.reload_check import ReloadCheck
from rlkit.sync.updater import WeightUpdater, engine_checksums
from rlkit.types.errors import SyncError
from rlkit.types.ranks import EngineEndpoint, RankInfo
from rlkit.types.weights import WeightBucket, WeightSource, WeightSpec

RANK = RankInfo(rank=0, world_size=1, local_rank=0, master_addr="127.0.0.1", master_port=0, device="cpu", num_threads=1)
SMALL_BUCKET = 4096


@pytest.fixture(scope="module")
def trainer(other_folder: Path) -> FsdpBackend:
    """A training rank whose weights differ from those that the engine started with."""
    backend = FsdpBackend()
    cfg = replace(RunConfig(), model=ModelConfig(hf_checkpoint=str(other_folder), dtype="float32"))
    backend.init(cfg, RANK, resume_from=None)
    return backend


def endpoint(engine: RunningEngine, *, colocated: bool) -> EngineEndpoint:
    return EngineEndpoint(index=0, url=engine.url, num_gpus=1, colocated_ranks=(0,) if colocated else ())


def ipc(engine: RunningEngine, _: Path) -> WeightChannel:
    return IpcChannel(
        RANK, [endpoint(engine, colocated=True)], max_bytes=SMALL_BUCKET, timeout_s=60.0, with_checksums=True
    )


def group(engine: RunningEngine, _: Path) -> WeightChannel:
    return GroupChannel(
        RANK,
        [endpoint(engine, colocated=False)],
        backend="gloo",
        max_bytes=SMALL_BUCKET,
        timeout_s=60.0,
        with_checksums=True,
    )


def disk(engine: RunningEngine, folder: Path) -> WeightChannel:
    return DiskChannel(
        RANK,
        [endpoint(engine, colocated=False)],
        directory=folder,
        model_dir=engine.folder,
        max_bytes=SMALL_BUCKET,
        timeout_s=60.0,
        with_checksums=True,
    )


CHANNELS = {"ipc": ipc, "group": group, "disk": disk}


def checksums_in(engine: RunningEngine) -> dict[str, str]:
    async def ask(_: Any, control: Any) -> dict[str, Any]:
        return await control.weights_checker("checksum")

    return engine_checksums(engine.run(ask))


def updater(engine: RunningEngine, push: Callable[[int], PushReport]) -> WeightUpdater:
    return WeightUpdater([endpoint(engine, colocated=False)], push, engines_sleep=False, timeout_s=60.0, spans=Spans())


@pytest.fixture(scope="module")
def exported(trainer: FsdpBackend, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    trainer.save(0, tmp_path_factory.mktemp("checkpoint"), hf_directory=folder)
    return folder


@pytest.mark.parametrize("make", CHANNELS.values(), ids=CHANNELS)
def test_channel_and_exported_checkpoint_give_the_same_weights(embedded, trainer, exported, tmp_path, make):
    async def load_exported(_: Any, control: Any) -> None:
        await control.update_from_disk(path=str(exported), version=8)

    before = checksums_in(embedded)
    embedded.run(load_exported)
    expected = checksums_in(embedded)
    assert expected.keys() == before.keys() and all(expected[name] != before[name] for name in expected)

    async def restore(_: Any, control: Any) -> None:
        await control.update_from_disk(path=str(embedded.folder), version=9)

    embedded.run(restore)
    assert checksums_in(embedded) == before
    channel = make(embedded, tmp_path)
    updates = updater(embedded, lambda version: channel.push(trainer.weights, version))
    report = updates.update(10)  # compares with the trainer's checksums itself
    assert report.num_buckets > 1
    assert checksums_in(embedded) == expected
    updates.update(11)  # a second time over the same group and the same staging block
    channel.close()
    updates.close()
    assert not list(tmp_path.iterdir())


class TornChannel:
    """A channel that loses tensors on their way."""

    def __init__(self, engine: RunningEngine, lost: set[str]) -> None:
        self._inner = ipc(engine, Path())
        self._lost = lost

    def push(self, source: WeightSource, version: int) -> PushReport:
        lost = self._lost

        class Torn:
            def specs(self) -> list[WeightSpec]:
                return source.specs()

            def buckets(self, max_bytes: int) -> Iterator[WeightBucket]:
                for bucket in source.buckets(max_bytes):
                    kept = [i for i, spec in enumerate(bucket.specs) if spec.name not in lost]
                    specs, offsets = [bucket.specs[i] for i in kept], [bucket.offsets[i] for i in kept]
                    yield WeightBucket(specs=specs, offsets=offsets, flat=bucket.flat)

        return self._inner.push(Torn(), version)

    def close(self) -> None:
        self._inner.close()


def reload_check(engine: RunningEngine, inner: WeightChannel, folder: Path) -> ReloadCheck:
    loads = disk(engine, folder / "weights_check")
    assert isinstance(loads, DiskChannel)
    return ReloadCheck(inner, loads, RANK, [endpoint(engine, colocated=True)], timeout_s=60.0)


def test_a_load_from_disk_confirms_what_was_pushed(embedded, trainer, tmp_path):
    channel = reload_check(embedded, TornChannel(embedded, set()), tmp_path)
    report = channel.push(trainer.weights, 8)
    assert report.num_buckets > 1
    channel.close()
    assert not list(tmp_path.iterdir())


def test_a_load_from_disk_finds_the_tensor_that_was_lost(embedded, trainer, tmp_path):
    lost = "model.layers.1.mlp.up_proj.weight"
    assert lost in {spec.name for spec in trainer.weights.specs()}
    channel = reload_check(embedded, TornChannel(embedded, {lost}), tmp_path)
    with pytest.raises(SyncError, match=rf"1 of \d+ tensors of engine .* the first is {lost} of rank 0"):
        channel.push(trainer.weights, 8)
    channel.close()


def test_one_engine_alone_gets_its_weights_beside_the_others(embedded, trainer, tmp_path):
    """As after a restart: nothing is paused, and the channel exists for this one push."""
    channel = group(embedded, tmp_path)
    updates = updater(embedded, lambda _: pytest.fail("only one engine was to be updated"))
    updates.push_to(endpoint(embedded, colocated=False), lambda version: channel.push(trainer.weights, version), 12)
    channel.close()
    updates.close()

    async def version(_: Any, control: Any) -> int:
        return (await control.model_info()).weight_version

    assert embedded.run(version) == 12


def test_a_wrong_version_is_an_error(embedded):
    def push(version: int) -> PushReport:
        return PushReport(
            version=version, num_bytes=0, num_buckets=0, seconds=0.0, prepare_s=0.0, send_s=0.0, checksums=None
        )

    updates = updater(embedded, push)
    with pytest.raises(SyncError, match="reports weights v7 after an update to v8"):
        updates.update(8)
    updates.close()


def test_different_weights_are_an_error(embedded):
    async def version_only(_: Any, control: Any) -> None:
        await control.set_version(8)

    def push(version: int) -> PushReport:
        embedded.run(version_only)
        found = checksums_in(embedded)
        wrong = {**found, next(iter(found)): "0" * 64}
        return PushReport(
            version=version, num_bytes=0, num_buckets=0, seconds=0.0, prepare_s=0.0, send_s=0.0, checksums=wrong
        )

    updates = updater(embedded, push)
    with pytest.raises(SyncError, match=r"1 of .* tensors of engine .* differ"):
        updates.update(8)
    updates.close()


def test_the_first_error_of_any_engine_is_raised_after_all_have_answered():
    answered = []

    async def call(_: Any, place: EngineEndpoint) -> int:
        answered.append(place.index)
        if place.index == 0:
            raise SyncError("engine 0 refused")
        return place.index

    places = [EngineEndpoint(index=i, url="http://127.0.0.1:9", num_gpus=1, colocated_ranks=()) for i in range(3)]
    calls = EngineCalls(places, timeout_s=1.0)
    with pytest.raises(SyncError, match="engine 0 refused"):
        calls.all(call)
    assert answered == [0, 1, 2]
    calls.close()
