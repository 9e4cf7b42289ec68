"""`--update-weights-interval`: engines fall behind between two updates, and every sample says by how much."""

import orjson
import pytest

pytestmark = [pytest.mark.loop, pytest.mark.timeout(600)]


def test_weights_travel_every_second_step_and_after_the_last(run_training):
    layout = ("--actor-num-gpus-per-node", 1, "--rollout-num-gpus", 1, "--update-weights-interval", 2)
    run = run_training(*layout, "--num-rollout", 5, "--lr", 1e-2)
    events = [orjson.loads(line) for line in (run.directory / "ledger.jsonl").read_bytes().splitlines()]
    versions = {
        event["step"]: {version for sample in event["versions"] for version in sample}
        for event in events
        if event["event"] == "generated"
    }
    assert versions == {0: {0}, 1: {0}, 2: {2}, 3: {2}, 4: {4}}
    differences = run.series("train/train_rollout_logprob_abs_diff_max")
    fresh, stale = differences[0::2], differences[1::2]
    assert max(fresh) < 1e-3 < min(stale), "the engine computes with the weights that its version says"
    pushed = [row["step"] for row in run.rows if "sync/num_bytes" in row]
    assert pushed == [0, 1, 3, 4]  # the first row also has the update before it
