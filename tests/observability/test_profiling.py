"""The profiler of a training rank, on a CPU; the memory recorder on a GPU."""

import gzip
import json

import pytest
import torch

from rlkit.config.schema import ProfileConfig
from rlkit.observability.profiling import RankProfiler


def train_steps(profiler: RankProfiler, num_steps: int, device: str = "cpu") -> None:
    for step in range(num_steps):
        with profiler.step(step):
            torch.ones(32, 32, device=device).softmax(dim=1).sum().item()


def written(directory) -> list[str]:
    return sorted(path.name for path in directory.rglob("*") if path.is_file())


def test_chosen_steps_of_chosen_ranks_are_recorded(tmp_path):
    cfg = ProfileConfig(use_pytorch_profiler=True, profile_step_start=1, profile_step_end=3, profile_ranks=(1,))
    for rank in range(2):
        train_steps(RankProfiler(cfg, tmp_path, rank), num_steps=4)
    assert written(tmp_path) == ["train_rank1_step1.json.gz", "train_rank1_step2.json.gz"]
    with gzip.open(tmp_path / "profile" / "train_rank1_step2.json.gz") as file:
        names = [event["name"] for event in json.load(file)["traceEvents"]]
    assert names.count("aten::softmax") == 1, "one step a file"


def test_nothing_is_written_unless_asked_for(tmp_path):
    train_steps(RankProfiler(ProfileConfig(profile_step_start=0), tmp_path, rank=0), num_steps=2)
    assert written(tmp_path) == []


def test_an_error_of_the_step_is_not_hidden(tmp_path):
    cfg = ProfileConfig(use_pytorch_profiler=True, profile_step_start=0)
    with pytest.raises(RuntimeError, match="the step's own"), RankProfiler(cfg, tmp_path, rank=0).step(0):
        raise RuntimeError("the step's own")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_memory_snapshots_are_written_once(tmp_path):
    cfg = ProfileConfig(
        record_memory_history=True,
        memory_snapshot_num_steps=2,
        memory_snapshot_path="m.pickle",
        memory_snapshot_dir=str(tmp_path / "m"),
    )
    train_steps(RankProfiler(cfg, tmp_path, rank=0), num_steps=3, device="cuda")
    assert written(tmp_path) == ["m_rank0_step1.pickle"]
