"""The whole loop with stock SGLang in place of the embedded engine, on a CPU. `scripts/install_sglang_cpu.sh` installs
it; without RLKIT_SGLANG_PYTHON these tests are skipped."""

import os

import orjson
import pytest

pytestmark = [
    pytest.mark.loop,
    pytest.mark.slow,
    pytest.mark.sglang,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not os.environ.get("RLKIT_SGLANG_PYTHON"),
        reason="RLKIT_SGLANG_PYTHON is unset; scripts/install_sglang_cpu.sh installs SGLang and says how",
    ),
]

SGLANG = ("--rollout-engine", "sglang", "--sglang-device", "cpu", "--actor-num-gpus-per-node", 1)
LAYOUTS = {
    "colocated": ("--colocate",),
    "split": ("--rollout-num-gpus", 1),
    "split, requests survive updates": ("--rollout-num-gpus", 1, "--pause-generation-mode", "retract"),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_engine_computes_with_the_weights_of_each_step(run_training, layout):
    """A learning rate that moves log-probs by far more than the bound: only an engine that has received every update
    agrees with the trainer, and only with the step's own weights. The reload check compares every tensor, fused and
    unfused."""
    run = run_training(*SGLANG, *layout, "--num-rollout", 3, "--lr", 1e-2, "--check-weight-update-equal")
    assert len(run.rows) == 3
    assert max(run.series("train/train_rollout_logprob_abs_diff_max")) < 1e-4
    events = [orjson.loads(line) for line in (run.directory / "ledger.jsonl").read_bytes().splitlines()]
    versions = {
        event["step"]: {v for sample in event["versions"] for v in sample}
        for event in events
        if event["event"] == "generated"
    }
    assert versions == {0: {0}, 1: {1}, 2: {2}}
