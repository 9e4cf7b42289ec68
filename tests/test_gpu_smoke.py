"""The smoke tests for one and two GPUs, and the same scripts with the tiny model on rank slots of a CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = sorted(Path(__file__).parent.glob("test_qwen3-0.6B_*.sh"))
ON_ONE_GPU = Path(__file__).parent / "test_split_on_one_gpu.sh"


def run(script: Path, folder: Path, **environment: str) -> None:
    done = subprocess.run(
        ["bash", str(script)],
        env=os.environ | {"PYTHON": sys.executable, "RLKIT_SMOKE_DIR": str(folder), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    assert done.stdout.splitlines()[-1].startswith("PASS:"), done.stdout


@pytest.mark.gpu
@pytest.mark.multigpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_two_gpus(script, tmp_path):
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA GPUs")
    if not {"RLKIT_SMOKE_MODEL", "RLKIT_SMOKE_TOKENIZER"} & os.environ.keys():
        pytest.skip("RLKIT_SMOKE_MODEL or RLKIT_SMOKE_TOKENIZER names no folder")
    run(script, tmp_path)


@pytest.mark.gpu
@pytest.mark.timeout(900)
def test_trainer_and_engine_split_one_gpu(tmp_path):
    if not {"RLKIT_SMOKE_MODEL", "RLKIT_SMOKE_TOKENIZER"} & os.environ.keys():
        pytest.skip("RLKIT_SMOKE_MODEL or RLKIT_SMOKE_TOKENIZER names no folder")
    run(ON_ONE_GPU, tmp_path)


@pytest.mark.loop
@pytest.mark.slow
@pytest.mark.parametrize("script", [*SCRIPTS, ON_ONE_GPU], ids=lambda path: path.stem)
def test_two_rank_slots(script, tmp_path):
    run(script, tmp_path, RLKIT_SMOKE_DEVICE="cpu")


def test_both_layouts_are_there():
    assert [path.stem.removeprefix("test_qwen3-0.6B_fsdp_") for path in SCRIPTS] == [
        "colocated_2xGPU",
        "disaggregated_2xGPU",
    ]
