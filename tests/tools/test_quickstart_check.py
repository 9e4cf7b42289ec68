"""What the quick start says at its end."""

import subprocess
import sys
from pathlib import Path

import orjson
import pytest
import quickstart_check


def write_run(run: Path, scores: list[float], num_prompts: int = 512) -> None:
    run.mkdir(parents=True, exist_ok=True)
    rows = []
    for number, score in enumerate(scores):
        rows.append({"step": 10 * number, "eval/heldout": score, "eval/heldout/num_samples": float(num_prompts)})
        rows.append({"step": 10 * number, "rollout/reward": score + 0.1})
    (run / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows))


def check(run: Path, seconds: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, quickstart_check.__file__, "--run", str(run), "--seconds", str(seconds)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_good_run_passes_with_its_numbers_in_the_last_line(tmp_path):
    write_run(tmp_path, [0.43, 0.8, 0.94])
    done = check(tmp_path, 141)
    assert done.returncode == 0, done.stderr
    last = done.stdout.strip().splitlines()[-1]
    assert last == "PASS: greedy accuracy 0.430 -> 0.940 on 512 held-out prompts in 141 s"
    assert "reward" in done.stdout and (tmp_path / "reward.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("scores", "num_prompts", "seconds", "why"),
    [
        ([0.51, 0.94], 512, 100, "before training is 0.510"),
        ([0.43, 0.849], 512, 100, "after training is 0.849"),
        ([0.43, 0.94, 0.6], 512, 100, "after training is 0.600"),
        ([0.43, 0.94], 255, 100, "only 255 prompts"),
        ([0.43, 0.94], 512, 301, "took 301 s"),
        ([0.43], 512, 100, "holds 1 evaluations"),
        ([], 512, 100, "holds 0 evaluations"),
    ],
    ids=["too good before", "too bad after", "only the last counts", "few prompts", "slow", "one", "none"],
)
def test_a_bad_run_fails_and_says_why(tmp_path, scores, num_prompts, seconds, why):
    write_run(tmp_path, scores, num_prompts)
    done = check(tmp_path, seconds)
    assert done.returncode == 1
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("FAIL: ") and why in last, done.stdout + done.stderr


@pytest.mark.parametrize(("before", "after", "prompts", "seconds"), [(0.5, 0.85, 256, 300)], ids=["all at the limit"])
def test_the_limits_themselves_pass(before, after, prompts, seconds):
    assert quickstart_check.verdict(before, after, prompts, seconds) == []


def test_a_run_that_left_nothing_fails(tmp_path):
    done = check(tmp_path, 100)
    assert done.returncode == 1 and done.stdout.startswith("FAIL: there is no ")
