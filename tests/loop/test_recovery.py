"""A run that loses a rank goes on by itself; SIGTERM saves; Ctrl-C ends; a stopped engine is found and named."""

import os
import signal
import subprocess
import sys

import psutil
import pytest
from test_kills import command_of, family, is_gone, rows, start, wait_for

from rlkit.observability.audit import audit
from rlkit.observability.ledger import LedgerEvent, read_ledger

pytestmark = [pytest.mark.loop, pytest.mark.slow, pytest.mark.timeout(900)]

START_S = 400.0
ONE = ("--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1")


def console(tmp_path) -> str:
    return (tmp_path / "console.txt").read_text()


def wait_for_rows(tmp_path, driver: subprocess.Popen, count: int) -> None:
    wait_for(lambda: len(rows(tmp_path / "run")) >= count or driver.poll() is not None, START_S, lambda: "a step")
    assert driver.poll() is None, console(tmp_path)


def wait_until_gone(processes: list[psutil.Process]) -> None:
    def left() -> list[str]:
        return [f"{process.pid} {command_of(process)}" for process in processes if not is_gone(process)]

    wait_for(lambda: not left(), 15.0, lambda: f"the end of {left()}")


def test_a_killed_rank_is_followed_by_a_restart(tiny_model, task, tmp_path):
    """Two ranks, one killed: the other is not waited for, the run goes on in fresh processes, the ledger is proven."""
    layout = ("--actor-num-gpus-per-node", "2", "--rollout-num-gpus", "1", "--max-restarts", "1")
    driver = start(tiny_model, task, tmp_path / "run", 200, *layout)
    try:
        wait_for_rows(tmp_path, driver, 2)
        before = [process for process in family(driver) if "ray::TrainWorker" in command_of(process)]
        assert len(before) == 2
        before[1].send_signal(signal.SIGKILL)
        wait_for(lambda: "restart 1 of 1" in console(tmp_path), 60.0, lambda: "the restart")
        assert all(is_gone(process) for process in before)
        killed_at = len(rows(tmp_path / "run"))
        wait_for_rows(tmp_path, driver, killed_at + 2)
        driver.send_signal(signal.SIGTERM)
        assert driver.wait(120.0) == 143, console(tmp_path)
    finally:
        if driver.poll() is None:
            driver.kill()
    told = console(tmp_path)
    assert "WorkerDied: training rank 1 died" in told and "the end of" in told and "continuing at step" in told
    steps = [row["step"] for row in rows(tmp_path / "run")]
    assert steps == list(range(len(steps)))
    report = audit(read_ledger(tmp_path / "run" / "ledger.jsonl"))
    assert report.problems == []
    assert (report.attempts, report.restarts, report.num_steps) == (2, 1, len(steps))


def test_sigterm_saves_and_the_same_command_continues(tiny_model, task, tmp_path):
    driver = start(tiny_model, task, tmp_path / "run", 200, *ONE, "--save-interval", "1000")
    try:
        wait_for_rows(tmp_path, driver, 2)
        processes = family(driver)
        driver.send_signal(signal.SIGTERM)
        assert driver.wait(120.0) == 143, console(tmp_path)
        wait_until_gone(processes)
    finally:
        if driver.poll() is None:
            driver.kill()
    last = rows(tmp_path / "run")[-1]["step"]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("iter_*")] == [f"iter_{last:07d}"]
    events = [record.event for record in read_ledger(tmp_path / "run" / "ledger.jsonl")]
    assert events[-1] is LedgerEvent.STOPPED
    again = start(tiny_model, task, tmp_path / "run", last + 2, *ONE)
    assert again.wait(START_S) == 0, console(tmp_path)
    report = audit(read_ledger(tmp_path / "run" / "ledger.jsonl"))
    assert (report.problems, report.retrained, report.num_steps) == ([], [], last + 2)


def test_ctrl_c_ends_within_seconds(tiny_model, task, tmp_path):
    driver = start(tiny_model, task, tmp_path / "run", 200, *ONE)
    try:
        wait_for_rows(tmp_path, driver, 1)
        processes = family(driver)
        driver.send_signal(signal.SIGINT)
        wait_for(lambda: driver.poll() is not None, 15.0, lambda: "the end of the driver")
        wait_until_gone(processes)
        assert driver.returncode == 130, console(tmp_path)
    finally:
        if driver.poll() is None:
            driver.kill()


def test_a_stopped_engine_ends_the_run_with_its_name(tiny_model, task, tmp_path):
    """SIGSTOP: the engine's process lives, its port is open, and it never answers."""
    driver = start(tiny_model, task, tmp_path / "run", 200, *ONE, "--hang-timeout-s", "45")
    try:
        wait_for_rows(tmp_path, driver, 1)
        engine = next(
            process
            for process in family(driver)
            if "rlkit.engines.embedded.server" in command_of(process) and "guardian" not in command_of(process)
        )
        os.kill(engine.pid, signal.SIGSTOP)
        wait_for(lambda: driver.poll() is not None, 240.0, lambda: "the end of the driver")
        assert driver.returncode == 75, console(tmp_path)
        assert is_gone(engine)
    finally:
        if driver.poll() is None:
            driver.kill()
    told = console(tmp_path)
    for said in (
        "HangError: nothing has moved for",
        "the driver waits for",
        "engine 0 (http://127.0.0.1:",
        "does not answer",
        f"process {engine.pid} is stopped",
    ):
        assert said in told, told
    (folder,) = (tmp_path / "run" / "logs" / "hang").iterdir()
    assert any("TrainWorker" in path.name for path in folder.iterdir()) or "wrote their stacks" in told
    ledger = tmp_path / "run" / "ledger.jsonl"
    assert [record.fields["error"] for record in read_ledger(ledger) if record.event is LedgerEvent.FAILED] == [
        "HangError"
    ]
    audited = subprocess.run(
        [sys.executable, "-m", "rlkit.cli.main", "audit", str(tmp_path / "run")], capture_output=True
    )
    assert audited.returncode == 0, audited.stdout
