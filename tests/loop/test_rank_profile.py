"""Environment variables and the profiler reach a training rank of a whole run."""

import gzip
import json

import pytest

pytestmark = pytest.mark.loop


@pytest.mark.slow
def test_profile_and_environment_of_a_rank(run_training):
    run = run_training(
        *("--actor-num-gpus-per-node", 1, "--colocate", "--num-rollout", 2),
        *("--train-env-vars", '{"RLKIT_A_VARIABLE": "a value"}'),
        *("--use-pytorch-profiler", "--profile-step-start", 1, "--profile-step-end", 2),
    )
    log = (run.directory / "logs" / "train_rank0.log").read_text()
    assert "--train-env-vars: RLKIT_A_VARIABLE=a value" in log
    (trace,) = (run.directory / "profile").iterdir()
    assert trace.name == "train_rank0_step1.json.gz"
    with gzip.open(trace) as file:
        names = {event["name"] for event in json.load(file)["traceEvents"]}
    assert any("mm" in name for name in names) and any("Backward" in name for name in names)
