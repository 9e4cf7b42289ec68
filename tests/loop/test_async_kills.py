"""SIGKILL of a run that generates while it trains: the ledger is clean at once, and after the run was continued; with
fault tolerance a dead engine does not end it."""

import signal
import time

import pytest
from test_kills import VICTIMS, command_of, family, is_gone, rows, start, wait_for

from rlkit.observability.audit import audit
from rlkit.observability.ledger import LedgerEvent, read_ledger

pytestmark = [pytest.mark.loop, pytest.mark.slow, pytest.mark.timeout(900)]

SPLIT = ("--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1", "--rollout-max-response-len", "32")
MODES = {
    "one step": ("--async-mode", "one-step"),
    "full": ("--async-mode", "full", "--max-staleness", "2"),
}
PROGRAM = "train_async.py"


def victim(driver, name):
    return next(process for process in family(driver) if VICTIMS[name](command_of(process)))


def proven(run_dir):
    report = audit(read_ledger(run_dir / "ledger.jsonl"))
    assert report.problems == []
    return report


@pytest.mark.parametrize("name", ["driver", "engine"])
@pytest.mark.parametrize("mode", MODES)
def test_a_killed_run_is_continued_without_losing_or_repeating_a_prompt(tiny_model, task, tmp_path, mode, name):
    run_dir = tmp_path / "run"
    flags = (*SPLIT, *MODES[mode])
    driver = start(tiny_model, task, run_dir, 1000, *flags, program=PROGRAM)
    try:
        wait_for(lambda: len(rows(run_dir)) >= 4 or driver.poll() is not None, 240.0, lambda: "the fourth step")
        assert driver.poll() is None, (tmp_path / "console.txt").read_text()
        processes = family(driver)
        time.sleep(0.2)  # somewhere inside a step
        victim(driver, name).send_signal(signal.SIGKILL)
        wait_for(lambda: driver.poll() is not None, 30.0, lambda: "the end of the driver")
        wait_for(lambda: all(map(is_gone, processes)), 15.0, lambda: "the end of its processes")
    finally:
        if driver.poll() is None:
            driver.kill()
    proven(run_dir)
    last_saved = max(int(path.name[5:]) for path in (run_dir / "checkpoints").glob("iter_*"))
    again = start(tiny_model, task, run_dir, last_saved + 4, *flags, program=PROGRAM)
    assert again.wait(300.0) == 0, (tmp_path / "console.txt").read_text()
    report = proven(run_dir)
    assert (report.attempts, report.num_steps, report.is_finished) == (2, last_saved + 4, True)
    assert report.num_trained == 8 * report.num_steps and report.num_dropped == 0
    trained = [r for r in read_ledger(run_dir / "ledger.jsonl") if r.event is LedgerEvent.KEPT]
    assert max(age for record in trained for age in record.fields["staleness"]) <= 2


@pytest.mark.parametrize("pause", ["abort", "retract"])
@pytest.mark.parametrize("mode", MODES)
def test_an_engine_that_dies_meanwhile_comes_back_with_the_right_weights(tiny_model, task, tmp_path, mode, pause):
    run_dir = tmp_path / "run"
    flags = (*SPLIT, *MODES[mode], "--use-fault-tolerance", "--pause-generation-mode", pause)
    driver = start(tiny_model, task, run_dir, 1000, *flags, program=PROGRAM)
    try:
        wait_for(lambda: len(rows(run_dir)) >= 3 or driver.poll() is not None, 240.0, lambda: "the third step")
        assert driver.poll() is None, (tmp_path / "console.txt").read_text()
        victim(driver, "engine").send_signal(signal.SIGKILL)
        count = len(rows(run_dir))
        wait_for(lambda: len(rows(run_dir)) >= count + 4 or driver.poll() is not None, 240.0, lambda: "further steps")
        told = (tmp_path / "console.txt").read_text()
        assert driver.poll() is None and "is back with weights" in told, told
        driver.send_signal(signal.SIGTERM)
        assert driver.wait(120.0) == 143, told
    finally:
        if driver.poll() is None:
            driver.kill()
    report = proven(run_dir)
    assert (report.attempts, report.num_dropped) == (1, 0)
    # an engine that answered before it had its weights would show here: its log-probs would not be the trainer's
    fresh = [row for row in rows(run_dir) if row.get("staleness/max") == 0]
    assert all(row["train/train_rollout_logprob_abs_diff"] < 1e-3 for row in fresh)
