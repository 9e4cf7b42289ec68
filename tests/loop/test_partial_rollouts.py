"""Oversampling, a filter and partial rollouts through the whole loop, with a resume between two steps."""

import orjson
import pytest

from rlkit.observability.audit import audit
from rlkit.observability.ledger import LedgerEvent, read_ledger

pytestmark = pytest.mark.loop


def test_cut_off_groups_are_continued_at_new_weights_also_after_a_resume(run_training, tmp_path):
    record = tmp_path / "rollout_{rollout_id}.jsonl"
    flags = (
        "--actor-num-gpus-per-node", 1, "--colocate", "--rollout-max-response-len", 24,
        "--over-sampling-batch-size", 14, "--dynamic-sampling-filter-path", "check_reward_nonzero_std",
        "--partial-rollout", "--sglang-server-concurrency", 24, "--save-debug-rollout-data", record,
    )  # fmt: skip
    first = run_training(*flags, "--num-rollout", 2)
    second = run_training(*flags, "--num-rollout", 3)
    assert first.directory == second.directory and len(second.rows) == 3
    assert all(row["rollout/groups_cut_off"] > 0 for row in second.rows)
    assert [row["rollout/groups_continued"] > 0 for row in second.rows] == [False, True, True]
    assert max(second.series("train/train_rollout_logprob_abs_diff")[:1]) < 1e-4
    resumed = (tmp_path / "rollout_2.jsonl").read_bytes().splitlines()[1:]
    versions = [tuple(s["weight_versions"]) for line in resumed for s in orjson.loads(line)["samples"]]
    assert len(resumed) == 8 and any(min(v) < 2 for v in versions), "made before the resume, trained on after it"
    assert all(
        len(s["loss_mask"]) == len(s["rollout_logprobs"]) == len(s["tokens"]) - s["prompt_length"]
        for line in resumed
        for s in orjson.loads(line)["samples"]
    )
    report = audit(read_ledger(second.directory / "ledger.jsonl"))
    assert report.problems == [] and report.num_steps == 3
    buffered = {
        r.fields["reason"] for r in read_ledger(second.directory / "ledger.jsonl") if r.event is LedgerEvent.BUFFERED
    }
    assert buffered == {"continue"}
