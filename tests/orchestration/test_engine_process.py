"""The actor that launches an engine: quick to come up, and clear about how an engine has died."""

import subprocess
import sys
from pathlib import Path

import pytest

from rlkit.config.schema import EngineConfig, ModelConfig, RunConfig
from rlkit.orchestration.engine_process import EnginePart, EngineServer
from rlkit.types.errors import EngineError


def test_nothing_heavy_is_imported_before_an_engine_is_launched():
    code = "import rlkit.orchestration.engine_process, sys; print('torch' in sys.modules, 'aiohttp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False False\n"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineServer:
    monkeypatch.setattr("rlkit.orchestration.engine_process.claim_output", lambda run_dir, process: None)
    cfg = RunConfig(
        model=ModelConfig(hf_checkpoint=str(tmp_path / "no-model")), engine=EngineConfig(rollout_engine="embedded")
    )
    return EngineServer(cfg, tmp_path, 0)


def test_an_engine_that_dies_while_starting_says_so_with_the_end_of_its_log(server: EngineServer):
    part = EnginePart(host="127.0.0.1", num_gpus=1, base_gpu_id=0, device="cpu", num_threads=1)
    with pytest.raises(EngineError, match=r"(?s)engine 0 ended with status 1 while starting; the end of .*no-model"):
        server.start(part, weight_version=3)
    server.stop()
