"""`--use-fault-tolerance`: an engine is killed in the middle of a rollout and the run completes, with every prompt
accounted for."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import orjson
import psutil
import pytest

pytestmark = [pytest.mark.loop, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
NUM_STEPS = 4
PROMPTS, SAMPLES = 8, 4
LAYOUTS = {
    "two engines, split": ("--rollout-num-gpus", 2),
    "the only engine, colocated": ("--colocate",),
}


def start(tiny_model: Path, task: Path, run_dir: Path, *layout: object) -> subprocess.Popen[bytes]:
    argv = [
        sys.executable, "train.py", "--hf-checkpoint", tiny_model, "--prompt-data", task / "train.jsonl",
        "--label-key", "label", "--custom-rm-path", f"{task / 'reward.py'}:share_of_digits",
        "--rollout-batch-size", PROMPTS, "--n-samples-per-prompt", SAMPLES, "--rollout-max-response-len", 200,
        "--rollout-ignore-eos", "--num-rollout", NUM_STEPS, "--num-gpus-per-node", 4, "--actor-num-gpus-per-node", 1,
        "--device", "cpu", "--output-dir", run_dir, "--use-fault-tolerance", *layout,
    ]  # fmt: skip
    with (run_dir.parent / "console.txt").open("ab") as console:
        return subprocess.Popen([str(part) for part in argv], cwd=ROOT, stdout=console, stderr=console)


def events(run_dir: Path, kind: str) -> list[dict]:
    path = run_dir / "ledger.jsonl"
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [event for event in map(orjson.loads, lines) if event["event"] == kind]


def wait_for(condition: Callable[[], bool], timeout_s: float, console: Path) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, console.read_text()
        time.sleep(0.01)


def engine_of(driver: subprocess.Popen[bytes]) -> psutil.Process:
    """The process that generates, not the guardian that watches it."""
    children = psutil.Process(driver.pid).children(recursive=True)
    commands = {child: " ".join(child.cmdline()) for child in children if child.is_running()}
    return next(c for c, words in commands.items() if "embedded.server" in words and "guardian" not in words)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_killed_engine_comes_back_and_nothing_is_lost(tiny_model, task, tmp_path, layout):
    run_dir, console = tmp_path / "run", tmp_path / "console.txt"
    driver = start(tiny_model, task, run_dir, *layout)
    try:
        wait_for(lambda: len(events(run_dir, "issued")) > PROMPTS or driver.poll() is not None, 400.0, console)
        assert driver.poll() is None, console.read_text()
        os.kill(engine_of(driver).pid, signal.SIGKILL)
        assert len(events(run_dir, "generated")) < 2 * PROMPTS, "the engine was to die before the step was generated"
        assert driver.wait(400.0) == 0, console.read_text()
    finally:
        if driver.poll() is None:
            driver.kill()
    told = console.read_text()
    assert "has died" in told and "is back with weights v1" in told

    issued = [event["group"] for event in events(run_dir, "issued")]
    generated = events(run_dir, "generated")
    trained = [group for event in events(run_dir, "trained") for group in event["groups"]]
    assert sorted(issued) == sorted(trained) == list(range(NUM_STEPS * PROMPTS))
    assert sorted(event["group"] for event in generated) == sorted(issued)
    assert {status for event in generated for status in event["status"]} == {"truncated"}
    assert sum(event.get("reissued", 0) for event in generated) > 0
    for event in generated:
        assert all(versions == [event["step"]] for versions in event["versions"]), event
    rows = [orjson.loads(line) for line in (run_dir / "metrics.jsonl").read_bytes().splitlines()]
    assert [row["step"] for row in rows] == list(range(NUM_STEPS))
    assert max(row["train/train_rollout_logprob_abs_diff_max"] for row in rows) < 1e-3
