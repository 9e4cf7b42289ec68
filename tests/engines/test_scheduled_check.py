"""Which pushes are checked, and that the second pass finds a weight that did not arrive."""

from collections.abc import Iterator

import pytest
import torch

from rlkit.config.schema import EngineConfig, RunConfig, SyncConfig
from rlkit.sync import factory
from rlkit.sync.base import PushReport
from rlkit.sync.ipc import IpcChannel
from rlkit.sync.reload_check import ReloadCheck
from rlkit.sync.scheduled_check import ChecksumPass, ScheduledCheck
from rlkit.types.ranks import EngineEndpoint, RankInfo
from rlkit.types.weights import WeightBucket, WeightSpec, tensor_checksum

RANK = RankInfo(rank=0, world_size=1, local_rank=0, master_addr="127.0.0.1", master_port=0, device="cpu", num_threads=1)
ENGINE = EngineEndpoint(index=0, url="http://127.0.0.1:9", num_gpus=1, colocated_ranks=(0,))


class Source:
    def __init__(self) -> None:
        self.weight = torch.arange(4.0)

    def specs(self) -> list[WeightSpec]:
        return [WeightSpec(name="w", shape=(4,), dtype=torch.float32)]

    def buckets(self, max_bytes: int) -> Iterator[WeightBucket]:
        yield WeightBucket(specs=self.specs(), offsets=[0], flat=self.weight.view(torch.uint8))


class Channel:
    """Remembers the versions that were pushed through it."""

    def __init__(self) -> None:
        self.versions: list[int] = []
        self.is_closed = False

    def push(self, source, version: int) -> PushReport:
        from dataclasses import MISSING, fields

        self.versions.append(version)
        zeros = {f.name: 0 for f in fields(PushReport) if f.default is MISSING}
        return PushReport(**{**zeros, "version": version, "checksums": None})

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("interval, expected", [(1, [5, 6, 7, 8, 9, 10, 11]), (3, [5, 8, 11]), (100, [5])])
def test_the_first_push_and_every_nth_are_checked(interval, expected):
    plain, checked = Channel(), Channel()
    channel = ScheduledCheck(plain, checked, interval=interval)
    for version in range(5, 12):
        assert channel.push(Source(), version).version == version
    assert checked.versions == expected
    assert sorted(plain.versions + checked.versions) == list(range(5, 12))
    channel.close()
    assert checked.is_closed


def test_the_second_pass_reads_the_weights_themselves():
    source, inner = Source(), Channel()
    report = ChecksumPass(inner, max_bytes=64, is_main=True).push(source, 3)
    assert inner.versions == [3] and report.version == 3
    assert report.checksums == {"w": tensor_checksum(source.weight)}
    assert ChecksumPass(inner, max_bytes=64, is_main=False).push(source, 4).checksums is None


@pytest.mark.parametrize(
    "engine, equal, interval, expected",
    [
        ("embedded", False, None, [IpcChannel]),
        ("embedded", True, None, [IpcChannel]),
        ("embedded", False, 3, [ScheduledCheck, ChecksumPass]),
        ("embedded", True, 3, [IpcChannel]),
        ("sglang", False, None, [IpcChannel]),
        ("sglang", True, 3, [ReloadCheck]),
        ("sglang", False, 3, [ScheduledCheck, ReloadCheck]),
    ],
)
def test_the_flag_chooses_the_check(tmp_path, monkeypatch, engine, equal, interval, expected):
    monkeypatch.setattr(factory, "engine_kind", lambda *_: engine)
    sync = SyncConfig(
        update_weight_transport="ipc", check_weight_update_equal=equal, check_weight_update_interval=interval
    )
    cfg = RunConfig(sync=sync, engine=EngineConfig())
    channel = factory.create_channel(cfg, RANK, [ENGINE], run_dir=tmp_path)
    made: list[object] = [channel]
    if isinstance(channel, ScheduledCheck):
        made.append(channel._checked)
    assert [type(item) for item in made] == expected
    channel.close()
