"""Checkpoints and engines that the engine tests share. An engine is started once a session."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine_process import FIRST_VERSION, RunningEngine, running_engine
from reference_model import ReferenceModel
from tiny_model import save_model


@pytest.fixture(scope="session")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint that engines start from; its embeddings are tied."""
    return save_model(tmp_path_factory.mktemp("base"), seed=0, tie=True)


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture with other weights."""
    return save_model(tmp_path_factory.mktemp("other"), seed=1, tie=True)


@pytest.fixture(scope="session")
def base(base_folder: Path) -> ReferenceModel:
    return ReferenceModel(base_folder)


@pytest.fixture(scope="session")
def other(other_folder: Path) -> ReferenceModel:
    return ReferenceModel(other_folder)


@pytest.fixture(
    scope="session",
    params=[
        pytest.param(("embedded", "cpu"), id="embedded"),
        pytest.param(("embedded", "cuda"), id="embedded-cuda", marks=pytest.mark.gpu),
        pytest.param(("sglang", "cpu"), id="sglang", marks=[pytest.mark.sglang, pytest.mark.timeout(600)]),
    ],
)
def started_engine(
    request: pytest.FixtureRequest, base_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningEngine]:
    kind, device = request.param
    if kind == "sglang" and not os.environ.get("RLKIT_SGLANG_PYTHON"):
        pytest.skip("RLKIT_SGLANG_PYTHON is unset; scripts/install_sglang_cpu.sh installs SGLang and says how")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    with running_engine(kind, base_folder, tmp_path_factory.mktemp(f"{kind}-{device}"), device=device) as engine:
        yield engine


@pytest.fixture
def engine(started_engine: RunningEngine) -> Iterator[RunningEngine]:
    """The engine with its first weights and version, idle and not paused."""
    yield started_engine

    async def restore(_, control) -> None:
        await control.abort(None)
        await control.resume()
        await control.flush_cache()
        await control.update_from_disk(path=str(started_engine.folder), version=FIRST_VERSION)
        await control.flush_cache()

    started_engine.run(restore)


@pytest.fixture
def embedded(engine: RunningEngine) -> RunningEngine:
    """The engine, in tests of what only the embedded one promises."""
    if engine.kind != "embedded":
        pytest.skip("SGLang does not promise this")
    return engine
