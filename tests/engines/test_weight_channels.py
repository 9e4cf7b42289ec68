"""The trainer's half of a weight update against a running embedded engine: every channel, and the exported checkpoint,
give the same weights."""

from collections.abc import Callable
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
from rlkit.sync.updater import WeightUpdater, engine_checksums
from rlkit.types.errors import SyncError
from rlkit.types.ranks import EngineEndpoint, RankInfo

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
        RANK, [endpoint(engine, colocated=False)], max_bytes=SMALL_BUCKET, timeout_s=60.0, with_checksums=True
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


def test_a_wrong_version_is_an_error(embedded):
    def push(version: int) -> PushReport:
        return PushReport(version=version, num_bytes=0, num_buckets=0, seconds=0.0, checksums=None)

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
        return PushReport(version=version, num_bytes=0, num_buckets=0, seconds=0.0, checksums=wrong)

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
