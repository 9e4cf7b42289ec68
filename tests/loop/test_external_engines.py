"""`--rollout-external-engine-addrs`: engines that somebody else has started get weights over the process group, and
outlive the run."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.loop, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def engines(tiny_model: Path, tmp_path: Path) -> Iterator[list[str]]:
    """`host:port` of two embedded engines that no run owns."""
    from rlkit.config.schema import EngineConfig, ModelConfig, RunConfig
    from rlkit.engines.base import EngineSlot, build_launch, free_port
    from rlkit.orchestration.engine_process import wait_until_ready
    from rlkit.orchestration.processes import ServerProcess

    cfg = RunConfig(model=ModelConfig(hf_checkpoint=str(tiny_model)), engine=EngineConfig(rollout_engine="embedded"))
    addresses, processes = [], []
    for index in range(2):
        slot = EngineSlot(
            index=index,
            host="127.0.0.1",
            port=free_port("127.0.0.1"),
            num_gpus=1,
            base_gpu_id=0,
            device="cpu",
            num_threads=1,
            weight_version=0,
            seed=index,
        )
        spec = build_launch(cfg, slot)
        processes.append(ServerProcess(spec.argv, env=spec.env, log_path=tmp_path / f"external{index}.log"))
        addresses.append(f"127.0.0.1:{slot.port}")
    for index, (address, process) in enumerate(zip(addresses, processes, strict=True)):
        asyncio.run(wait_until_ready(f"http://{address}", process, index, timeout_s=240.0))
    yield addresses
    for process in processes:
        process.stop()


def versions_of(addresses: list[str]) -> list[int]:
    from rlkit.engines.client import EngineClient

    async def ask(address: str) -> int:
        async with EngineClient(f"http://{address}") as client:
            return (await client.model_info()).weight_version

    return [asyncio.run(ask(address)) for address in addresses]


def test_a_run_trains_with_engines_of_others_and_leaves_them(run_training, engines):
    flags = ("--actor-num-gpus-per-node", 1, "--rollout-external-engine-addrs", *engines, "--check-weight-update-equal")
    for name in ("first", "second"):  # the second finds what the first has left behind
        run = run_training(*flags, "--num-rollout", 2, name=name)
        assert len(run.rows) == 2
        assert max(run.series("train/train_rollout_logprob_abs_diff_max")) < 1e-3
        assert versions_of(engines) == [2, 2]


def test_an_address_where_nobody_answers_is_an_error(run_training):
    from rlkit.types.errors import EngineError

    with pytest.raises(EngineError, match=r"--rollout-external-engine-addrs 127\.0\.0\.1:9 cannot be used"):
        run_training("--actor-num-gpus-per-node", 1, "--rollout-external-engine-addrs", "127.0.0.1:9",
                     "--num-rollout", 1)  # fmt: skip
