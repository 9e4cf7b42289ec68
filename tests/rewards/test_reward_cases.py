"""The recorded bug cases of reward grading, each as it stands in the file."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from rlkit.rewards import grade

CASES = {
    case["id"]: case
    for line in (Path(__file__).parents[1] / "data" / "cases.jsonl").read_text(encoding="utf-8").split("\n")
    if line and (case := json.loads(line))["area"] == "reward grading"
}


def rewards_of(given: dict, rows: list) -> list[float]:
    rewards = []
    for row in rows:
        row = row if isinstance(row, dict) else {"response": row}
        row = {**{key: given[key] for key in ("rm_type", "label", "metadata") if key in given}, **row}
        response = row["prediction"] if "prediction" in row else row["response"]
        rewards.append(grade(row["rm_type"], response, row["label"], row.get("metadata")))
    return rewards


@pytest.mark.parametrize("name", [name for name in CASES if name != "rg-15"])
def test_rewards_of_the_recorded_case(name):
    given, expected = CASES[name]["input"], CASES[name]["expected"]
    wanted = expected.get("rewards") or expected.get("correct") or expected["f1"]
    assert rewards_of(given, given.get("rows") or given["responses"]) == pytest.approx(
        list(map(float, wanted)), abs=1e-9
    )
    if "control_rows" in given:
        assert rewards_of(given, given["control_rows"]) == expected["control_rewards"]


def test_a_grader_that_never_fires_says_so(caplog):
    response, label = CASES["rg-02"]["input"]["responses"][0], CASES["rg-02"]["input"]["label"]
    with caplog.at_level(logging.WARNING):
        assert [grade("math", response, label) for _ in range(8)] == [1.0] * 8
        assert not caplog.records
        assert [grade("deepscaler", response, label) for _ in range(8)] == [0.0] * 8
    assert "rm_type deepscaler" in caplog.text and "</think>" in caplog.text


def test_works_off_the_main_thread_and_returns_in_bounded_time():
    """rg-15, under the address-space limit that the case asks for, in a process of its own."""
    program = f"""
import json, resource, threading, time
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
from rlkit.rewards import grade
case = json.loads({json.dumps(json.dumps(CASES["rg-15"]["input"]))})
out = {{"b": [], "seconds": []}}
def a():
    out["a"] = grade(case["a"]["rm_type"], case["a"]["response"], case["a"]["label"])
thread = threading.Thread(target=a); thread.start(); thread.join()
for response in case["b"]["responses"]:
    began = time.monotonic()
    out["b"].append(grade(case["b"]["rm_type"], response, case["b"]["label"]))
    out["seconds"].append(time.monotonic() - began)
out["c"] = grade("math", r"\\boxed{{\\sqrt{{2}}}}", r"\\sqrt{{2}}")
out["again"] = grade("math", r"\\boxed{{\\sqrt{{8}}}}", r"2\\sqrt{{2}}")
print(json.dumps(out))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    out, expected = json.loads(done.stdout), CASES["rg-15"]["expected"]
    assert (out["a"], out["b"], out["c"]) == (expected["a"], expected["b"], expected["c"])
    assert max(out["seconds"]) < expected["b_each_call_returns_within_s"]
    assert out["again"] == 1.0, "algebra is still usable"
