"""A whole run from an fp8 checkpoint: engines start from it, are updated in fp8 and checked tensor by tensor, and the
trainer, whose masters are not rounded to fp8, scores their samples almost alike."""

import json
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.loop, pytest.mark.timeout(600)]

sys.path.append(str(Path(__file__).parents[2] / "tools"))


@pytest.mark.slow
def test_training_from_fp8_with_fp8_rollouts(run_training, tiny_model, tmp_path):
    import convert_hf_to_fp8

    folder = tmp_path / "fp8"
    convert_hf_to_fp8.convert(tiny_model, folder, exclude=[], is_ue8m0=False, num_workers=1)
    assert "quantization_config" in json.loads((folder / "config.json").read_text())
    layout = ("--actor-num-gpus-per-node", 1, "--num-gpus-per-node", 1, "--colocate", "--check-weight-update-equal")
    run = run_training(*layout, "--num-rollout", 4, "--lr", 1e-2, "--hf-checkpoint", folder)
    differences = run.series("train/train_rollout_logprob_abs_diff_max")
    # before the first step masters are values of fp8: rounding in float32 is all that differs
    assert differences[0] < 1e-3
    # afterwards the engine's weights are rounded to fp8, the trainer's are not
    assert all(1e-3 < value < 1.0 for value in differences[1:])
    assert torch.isfinite(torch.tensor(run.series("train/grad_norm"))).all()
