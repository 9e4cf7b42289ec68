"""Weights change in the middle of a response (`--pause-generation-mode retract`): every stretch is stamped with the
weights that it comes from."""

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_process import RunningEngine, running_engine
from reference_model import ReferenceModel

from rlkit.backends.fsdp.backend import FsdpBackend
from rlkit.config.schema import ModelConfig, RunConfig
from rlkit.observability.spans import Spans
from rlkit.rollout.generator import Generator
from rlkit.sync.ipc import IpcChannel
from rlkit.sync.updater import WeightUpdater
from rlkit.types.generation import SamplingParams
from rlkit.types.ranks import EngineEndpoint, RankInfo
from rlkit.types.samples import Sample, SampleStatus

RANK = RankInfo(rank=0, world_size=1, local_rank=0, master_addr="127.0.0.1", master_port=0, device="cpu", num_threads=1)
NUM_TOKENS = 300


@pytest.fixture(params=["embedded", pytest.param("sglang", marks=[pytest.mark.sglang, pytest.mark.timeout(600)])])
def keeping_engine(request: pytest.FixtureRequest, base_folder: Path, tmp_path: Path) -> Iterator[RunningEngine]:
    """Started for updates that requests survive: SGLang without its prefix cache, which would keep old keys."""
    if request.param == "sglang" and not os.environ.get("RLKIT_SGLANG_PYTHON"):
        pytest.skip("RLKIT_SGLANG_PYTHON is unset; scripts/install_sglang_cpu.sh installs SGLang and says how")
    with running_engine(request.param, base_folder, tmp_path, pause_mode="retract") as engine:
        yield engine


def test_a_response_over_two_versions_says_where_each_begins(
    keeping_engine: RunningEngine, base: ReferenceModel, other: ReferenceModel
):
    engine, backend = keeping_engine, FsdpBackend()
    backend.init(
        replace(RunConfig(), model=ModelConfig(hf_checkpoint=str(other.folder), dtype="float32")),
        RANK,
        resume_from=None,
    )
    place = EngineEndpoint(index=0, url=engine.url, num_gpus=1, colocated_ranks=(0,))
    channel = IpcChannel(RANK, [place], max_bytes=1 << 20, timeout_s=60.0, with_checksums=False)

    def push(version: int):
        return channel.push(backend.weights, version)

    updates = WeightUpdater([place], push, engines_sleep=False, timeout_s=60.0, spans=Spans(), pause_mode="retract")
    sample = Sample(group_id=0, index=0, seed=3, tokens=[30, 31], prompt_length=2)

    async def body(router, control) -> None:
        generator = Generator(
            router,
            [control],
            concurrency=4,
            max_context_len=None,
            timeout_s=60.0,
            run_tag="flight",
            follows_versions=True,
        )
        sampling = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True)
        task = asyncio.create_task(generator.generate(sample, sampling))
        while (await control.load()).num_running == 0:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        await asyncio.to_thread(updates.update, 8)
        await task

    engine.run(body)
    updates.close()
    channel.close()
    assert (sample.status, sample.response_length) == (SampleStatus.TRUNCATED, NUM_TOKENS)
    assert sample.weight_versions == [7, 8]
    first, second = sample.version_starts
    assert first == 0 < second < NUM_TOKENS
    prompt, response = sample.tokens[:2], sample.tokens[2:]
    for model, begin, end in ((base, 0, second), (other, second, NUM_TOKENS)):
        expected = torch.tensor(model.logprobs(prompt, response)[begin:end])
        torch.testing.assert_close(torch.tensor(sample.rollout_logprobs[begin:end]), expected, atol=1e-3, rtol=0)
