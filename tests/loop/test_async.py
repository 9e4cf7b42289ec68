"""`train_async.py` through the whole loop, one rank and one engine side by side: one step ahead, and never stopping."""

import orjson
import pytest

import train
import train_async
from rlkit.observability.audit import AuditReport, audit
from rlkit.observability.ledger import LedgerEvent, LedgerRecord, read_ledger

pytestmark = [pytest.mark.loop, pytest.mark.timeout(600)]

SPLIT = ("--actor-num-gpus-per-node", 1, "--rollout-num-gpus", 1)


def ledger(run) -> list[LedgerRecord]:
    return list(read_ledger(run.directory / "ledger.jsonl"))


def proven(run) -> AuditReport:
    report = audit(ledger(run))
    assert report.problems == []
    return report


@pytest.mark.slow
def test_one_step_ahead_and_resumed(run_training, task):
    """Every rollout but the first comes from weights one step old; what was in flight at a save is issued again."""
    flags = (
        *SPLIT, "--save-interval", 2, "--keep-checkpoints", 9,
        "--eval-interval", 2, "--eval-prompt-data", "toy", task / "test.jsonl",
    )  # fmt: skip
    first = run_training(*flags, "--num-rollout", 4, main=train_async.main)
    assert first.series("staleness/max") == [0, 1, 1, 1] == first.series("staleness/mean")
    versions = {
        record.fields["step"]: {version for sample in record.fields["versions"] for version in sample}
        for record in ledger(first)
        if record.event is LedgerEvent.GENERATED
    }
    assert versions == {0: {0}, 1: {0}, 2: {1}, 3: {2}}
    assert len(first.series("eval/toy")) == 3
    assert all(0.0 <= row["bubble/trainer"] <= 1.0 and 0.0 <= row["bubble/engines"] <= 1.0 for row in rows(first))
    assert (proven(first).num_trained, proven(first).num_waiting) == (32, 0)

    # step 1 was saved while step 2 was being generated: go back there
    again = run_training(*flags, "--num-rollout", 4, "--ckpt-step", 1, main=train_async.main)
    report = proven(again)
    assert (report.attempts, report.num_steps, report.num_trained, report.num_waiting) == (2, 4, 32, 0)
    assert [retrained.step for retrained in report.retrained] == [2, 3]
    issued = [r.fields for r in ledger(again) if r.event is LedgerEvent.ISSUED and r.fields["step"] == 2]
    assert len(issued) == 16
    assert [(e["group"], e["position"], e["seeds"]) for e in issued[:8]] == [
        (e["group"], e["position"], e["seeds"]) for e in issued[8:]
    ]


def rows(run) -> list[dict]:
    return [row for row in run.rows if "rollout/reward" in row]


def test_generation_that_never_stops_and_resumed(run_training, task):
    flags = (
        *SPLIT, "--async-mode", "full", "--max-staleness", 2, "--rollout-max-response-len", 32, "--save-interval", 2,
        "--keep-checkpoints", 9, "--eval-interval", 3, "--eval-prompt-data", "toy", task / "test.jsonl",
    )  # fmt: skip
    first = run_training(*flags, "--num-rollout", 6, main=train_async.main)
    ages = first.series("staleness/max")
    assert max(ages) <= 2 and sum(age > 0 for age in ages) >= 4
    assert max(first.series("rollout/groups_waiting")) <= 3 * 8
    assert len(first.series("eval/toy")) == 3
    report = proven(first)
    assert (report.num_steps, report.num_trained, report.drop_reasons) == (6, 48, {})
    assert report.num_waiting > 0, "generation went on until the end"
    left = {r.fields["reason"] for r in ledger(first) if r.event is LedgerEvent.BUFFERED}
    assert left == {"run_ended"}
    kept = [r.fields for r in ledger(first) if r.event is LedgerEvent.KEPT]
    assert all(len(event["staleness"]) == 4 and max(event["staleness"]) <= 2 for event in kept)

    # the last checkpoint holds a pool; finished groups of it are not generated a second time
    state = orjson.loads((first.directory / "checkpoints" / "iter_0000005" / "rollout_state.json").read_bytes())
    waiting = [item["group"] for item in state["waiting"]]
    finished = [g["group_id"] for g in waiting if all(s["status"] in ("completed", "truncated") for s in g["samples"])]
    assert 0 < len(waiting) <= 24
    second = run_training(*flags, "--num-rollout", 8, main=train_async.main)
    report = proven(second)
    assert (report.attempts, report.num_steps, report.num_trained) == (2, 8, 64)
    assert report.retrained == [] and report.num_groups >= 64
    trained = {n for r in ledger(second) if r.event is LedgerEvent.TRAINED for n in r.fields["groups"]}
    assert not finished or trained & set(finished), "the oldest come first"


@pytest.mark.slow
def test_the_same_weights_give_the_same_responses_however_they_are_updated(run_training, tmp_path):
    """Learning rate 0: whether an update waits for responses, holds them back or cuts them off, they end up equal."""
    responses, mixed = {}, {}
    flags = (*SPLIT, "--lr", 0, "--num-rollout", 4, "--rollout-max-response-len", 64, "--rollout-ignore-eos")
    variants = {
        "in turns": (train.main,),
        "one step, after the last response": (train_async.main,),
        "one step, held back": (train_async.main, "--pause-generation-mode", "retract"),
        "full, cut off and continued": (train_async.main, "--async-mode", "full"),
        "full, held back": (train_async.main, "--async-mode", "full", "--pause-generation-mode", "retract"),
    }
    for number, (name, (main, *more)) in enumerate(variants.items()):
        record = tmp_path / f"{number}_{{rollout_id}}.jsonl"
        run = run_training(*flags, *more, "--save-debug-rollout-data", record, name=f"run{number}", main=main)
        proven(run)
        lines = [
            line for step in range(4) for line in (tmp_path / f"{number}_{step}.jsonl").read_bytes().splitlines()[1:]
        ]
        samples = [s for line in lines for s in orjson.loads(line)["samples"]]
        responses[name] = {(s["group_id"], s["index"]): s["tokens"] for s in samples}
        mixed[name] = sum(len(s["weight_versions"]) > 1 for s in samples)
        assert max(run.series("train/train_rollout_logprob_abs_diff")) < 1e-4, name
    for name, found in responses.items():
        common = found.keys() & responses["in turns"].keys()
        assert len(common) >= 3 * 8 * 4, (name, len(common))
        assert {key: found[key] for key in common} == {key: responses["in turns"][key] for key in common}, name
    assert [name for name, count in mixed.items() if count] == [
        name for name in variants if "held" in name or "cut" in name
    ]
