"""An fp8 checkpoint means that the trainer trains what it dequantises to, and that engines get fp8: through every
channel the engine holds dequantise(quantise(master))."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_process import RunningEngine, running_engine
from fp8_folder import is_quantised, save_fp8
from torch import Tensor

from rlkit.algo.fp8 import dequantise, quantise
from rlkit.backends.fsdp.backend import BackendState, FsdpBackend
from rlkit.backends.fsdp.model import local_shard, named_shards
from rlkit.config.schema import ClusterConfig, ModelConfig, RunConfig, SyncConfig
from rlkit.observability.spans import Spans
from rlkit.sync.factory import create_channel
from rlkit.sync.updater import WeightUpdater, engine_checksums
from rlkit.types.errors import SyncError
from rlkit.types.generation import GenerateRequest, SamplingParams
from rlkit.types.ranks import EngineEndpoint, RankInfo
from rlkit.types.weights import tensor_checksum

RANK = RankInfo(rank=0, world_size=1, local_rank=0, master_addr="127.0.0.1", master_port=0, device="cpu", num_threads=1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Tensor]]:
    """The checkpoint of the engine, that of the trainer, and the tensors of the latter."""
    first, second = tmp_path_factory.mktemp("fp8"), tmp_path_factory.mktemp("fp8_other")
    save_fp8(first, seed=0)
    return first, second, save_fp8(second, seed=1)


@pytest.fixture(scope="module")
def engine(folders, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    with running_engine("embedded", folders[0], tmp_path_factory.mktemp("engine")) as started:
        yield started


@pytest.fixture(scope="module")
def trainer(folders) -> FsdpBackend:
    backend = FsdpBackend()
    cfg = replace(RunConfig(), model=ModelConfig(hf_checkpoint=str(folders[1]), dtype="float32"))
    backend.init(cfg, RANK, resume_from=None)
    assert checksums_of(masters(backend)) == checksums_of(dequantised_folder(folders[2]))
    with torch.no_grad():  # what training does: weights that are no values of fp8 any more
        for _, shard in named_shards(backend._parts("train", BackendState.AWAKE).policy):
            local_shard(shard).mul_(1.01).add_(0.003)
    return backend


def masters(trainer: FsdpBackend) -> dict[str, Tensor]:
    return {name: t.clone() for bucket in trainer.weights.buckets(1 << 30) for name, t in bucket.tensors()}


def dequantised_folder(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """float32."""
    return {
        name: dequantise(tensor, tensors[f"{name}_scale_inv"], dtype=torch.float32)
        if is_quantised(name)
        else tensor.float()
        for name, tensor in tensors.items()
        if not name.endswith("_scale_inv")
    }


def checksums_of(tensors: dict[str, Tensor]) -> dict[str, str]:
    return {name: tensor_checksum(tensor) for name, tensor in tensors.items()}


def checksums_in(engine: RunningEngine) -> dict[str, str]:
    async def ask(_: Any, control: Any) -> dict[str, Any]:
        return await control.weights_checker("checksum")

    return engine_checksums(engine.run(ask))


def dequantised_checksums(tensors: dict[str, Tensor]) -> dict[str, str]:
    """Of plain weights that went through fp8 where the checkpoint has fp8."""

    def held(name: str, tensor: Tensor) -> Tensor:
        return dequantise(*quantise(tensor), dtype=torch.float32) if is_quantised(name) else tensor.float()

    return {name: tensor_checksum(held(name, tensor)) for name, tensor in tensors.items()}


def test_the_engine_starts_with_the_dequantised_checkpoint(engine, folders, tmp_path):
    assert checksums_in(engine) == checksums_of(dequantised_folder(save_fp8(tmp_path / "again", seed=0)))


@pytest.mark.parametrize("transport", ["ipc", "nccl", "disk"])
def test_every_channel_quantises(engine, trainer, folders, tmp_path, transport):
    cfg = replace(
        RunConfig(),
        model=ModelConfig(hf_checkpoint=str(folders[1]), dtype="float32"),
        cluster=ClusterConfig(colocate=transport == "ipc", device="cpu"),
        # 30,000 bytes: some tensors alone are larger, others share a bucket
        sync=SyncConfig(
            update_weight_transport=transport, update_weight_buffer_size=30_000, check_weight_update_equal=True
        ),
    )
    place = EngineEndpoint(index=0, url=engine.url, num_gpus=1, colocated_ranks=(0,) if transport == "ipc" else ())

    async def restore(_: Any, control: Any) -> None:
        await control.update_from_disk(path=str(folders[0]), version=7)

    engine.run(restore)
    expected = dequantised_checksums(masters(trainer))
    before = checksums_in(engine)
    assert all(before[name] != expected[name] for name in expected if "norm" not in name)
    channel = create_channel(cfg, RANK, [place], run_dir=tmp_path)
    updates = WeightUpdater(
        [place],
        lambda version: channel.push(trainer.weights, version),
        engines_sleep=False,
        timeout_s=60,
        spans=Spans(),
    )
    report = updates.update(10)  # compares checksums itself too
    assert report.num_buckets > 3
    assert report.num_bytes < sum(tensor.nbytes for tensor in masters(trainer).values()) / 2
    assert checksums_in(engine) == expected
    channel.close()
    updates.close()

    async def generate(router: Any, _: Any) -> Any:
        return await router.generate(
            GenerateRequest(
                rid=f"fp8-{transport}", input_ids=[1, 2, 3], seed=0, sampling=SamplingParams(max_new_tokens=4)
            )
        )

    assert len(engine.run(generate).output_ids) > 0


def test_a_check_sees_weights_that_were_not_quantised(engine, trainer, folders, tmp_path):
    """The expected checksums are those of fp8, not of whatever was sent."""
    from rlkit.sync.engine_weights import EngineWeightChannel, RoundTripCheck
    from rlkit.sync.ipc import IpcChannel

    place = EngineEndpoint(index=0, url=engine.url, num_gpus=1, colocated_ranks=(0,))
    names = frozenset(name for name in masters(trainer) if is_quantised(name))
    plain = IpcChannel(RANK, [place], max_bytes=1 << 20, timeout_s=60.0, with_checksums=False)

    class Unquantised(EngineWeightChannel):
        def push(self, source, version):
            return plain.push(source, version)

    channel = RoundTripCheck(Unquantised(plain, names, None), max_bytes=1 << 20, is_main=True)
    updates = WeightUpdater(
        [place],
        lambda version: channel.push(trainer.weights, version),
        engines_sleep=False,
        timeout_s=60,
        spans=Spans(),
    )
    with pytest.raises(SyncError, match=rf"{len(names)} of \d+ tensors of engine"):
        updates.update(20)
    channel.close()
    updates.close()


def test_an_export_is_plain_bfloat16(trainer, tmp_path):
    trainer.save(0, tmp_path / "state", hf_directory=tmp_path / "hf")
    import json

    from safetensors import safe_open

    assert "quantization_config" not in json.loads((tmp_path / "hf" / "config.json").read_text())
    with safe_open(tmp_path / "hf" / "model.safetensors", framework="pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    expected = masters(trainer)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name].bfloat16()) for name in found)
