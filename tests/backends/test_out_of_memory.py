"""A full GPU is an error with a phase, numbers and flags."""

from pathlib import Path

import pytest
import torch
from fsdp_setup import make_config

from rlkit.backends.out_of_memory import explained
from rlkit.types.errors import TrainError


def test_names_phase_numbers_and_flags(tmp_path: Path) -> None:
    cfg = make_config(tmp_path, max_tokens_per_gpu=4096, colocate=True, actor_num_gpus_per_node=4)
    with pytest.raises(TrainError) as caught, explained("training step 7", cfg):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nlong hints")
    message = str(caught.value)
    for said in (
        "while training step 7",
        "Tried to allocate 2.00 GiB",
        "--max-tokens-per-gpu (now 4096)",
        "--gradient-checkpointing",
        "--context-parallel-size (now 1)",
        "--sglang-mem-fraction-static",
    ):
        assert said in message
    assert "long hints" not in message


def test_leaves_other_errors_alone(tmp_path: Path) -> None:
    with pytest.raises(ValueError), explained("saving", make_config(tmp_path)):
        raise ValueError("something else")


@pytest.mark.gpu
def test_a_full_gpu_is_explained(tmp_path: Path) -> None:
    with (
        pytest.raises(TrainError, match=r"This rank holds .* GiB are free"),
        explained("testing", make_config(tmp_path)),
    ):
        torch.empty(1 << 45, dtype=torch.uint8, device="cuda")
