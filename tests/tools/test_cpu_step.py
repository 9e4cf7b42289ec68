"""The arithmetic of the CPU benchmark; its runs are measurements, not tests."""

import cpu_step
import orjson
import pytest
import workload

LOAD = workload.Workload(
    name="tiny",
    model="m",
    prompts="p",
    num_prompts=4,
    samples_per_prompt=8,
    max_response_len=8,
    num_steps=3,
    num_warmup_steps=1,
    num_threads=1,
)


def write_metrics(run_dir, rows):
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_bytes(
        b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows)
    )


def row(step: int, total: float) -> dict[str, float]:
    return {
        "step": step,
        "time/step_s": total,
        "time/generate_s": 1.0,
        "time/grade_s": 0.25,
        "time/train_s": 0.5,
        "time/sync_s": 0.25,
        "rollout/response_length": 4.0,
        "rollout/num_samples": 32.0,
    }


def test_warm_up_and_evaluations_are_not_counted(tmp_path):
    write_metrics(tmp_path / "run", [{"step": 0, "eval/x": 1.0}, row(0, 90.0), row(1, 2.5), row(2, 3.5)])
    times = cpu_step.rlkit_times(LOAD, tmp_path / "run")
    assert [step.total for step in times] == [2.5, 3.5]
    assert {step.response_tokens for step in times} == {128.0}
    assert {(step.generate, step.train) for step in times} == {(1.0, 0.5)}


def test_overhead_is_what_no_named_phase_explains():
    assert cpu_step.overhead_share([row(0, 2.0), row(1, 2.5)]) == pytest.approx(0.5 / 4.5)


def test_comparison_says_who_is_faster_by_how_much(capsys):
    ours = [workload.StepTimes(total=2.0, generate=1.0, train=0.5, response_tokens=100.0)] * 3
    theirs = [workload.StepTimes(total=3.0, generate=2.5, train=0.25, response_tokens=100.0)] * 3
    cpu_step.print_comparison(ours, theirs)
    lines = {line.split("  ")[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert lines["total [s]"][-1] == "1.50" and lines["train [s]"][-1] == "0.50"
    assert lines["response tokens/s"][2:5] == ["50", "33", "1.50"]


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [("It is 95.", "95", 1.0), ("9 + 5 = 14", "14", 1.0), ("95 no 85", "95", 0.0), ("none", "95", 0.0)],
)
def test_reward_of_both_sides(response, label, expected):
    assert workload.reward(response, label, {}) == workload.last_number_equals(response, label) == expected
