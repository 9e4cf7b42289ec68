"""Reports are written whatever the end, a large difference is explained once, and nothing of it ends a run."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from rlkit.config.schema import ReportConfig, RunConfig
from rlkit.observability.guards import GAP
from rlkit.observability.ledger import Ledger, LedgerEvent
from rlkit.observability.replay_files import read_steps
from rlkit.orchestration import telling
from rlkit.orchestration.telling import Telling
from rlkit.orchestration.undertaker import write_last_report

BROKEN = Path(__file__).parents[1] / "data" / "broken_runs"
CFG = RunConfig(report=ReportConfig(mismatch_bound=0.05, record_for_replay=1))


def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of explanations; none really runs."""
    commands: list[list[str]] = []

    class Process:
        def __init__(self, command: list[str], **options: object) -> None:
            commands.append(command)

        def wait(self, timeout: float | None = None) -> int:
            return 0

    monkeypatch.setattr(telling.subprocess, "Popen", Process)
    return commands


def test_a_difference_is_explained_once_with_the_weights_of_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    commands = started(monkeypatch)
    (tmp_path / "logs").mkdir()
    said: list[str] = []
    teller = Telling(CFG, tmp_path, said.append)
    saves = []
    for step, gap in enumerate([0.01, 0.2, 0.3, 0.4]):
        teller.after_rollout(step, {})
        teller.after_training(step, {GAP: gap})
        saves.append(teller.wants_save)
        teller.after_step(step, {GAP: gap})
    teller.close()
    assert saves == [False, True, False, False]
    assert [command[-3:] for command in commands] == [[str(tmp_path), "--step", "2"]]
    assert any("looking for the cause" in line for line in said)


@pytest.mark.parametrize("report", [{"explain_mismatch": False}, {"report_samples": 0}])
def test_who_does_not_want_it_gets_no_save_and_no_process(report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    commands = started(monkeypatch)
    teller = Telling(replace(CFG, report=replace(CFG.report, **report)), tmp_path, print)
    for step in range(3):
        teller.after_training(step, {GAP: 9.0})
        assert not teller.wants_save
        teller.after_step(step, {})
    assert commands == []


def test_the_report_of_the_end_knows_how_the_run_ended(tmp_path: Path):
    teller = Telling(CFG, tmp_path, print)
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        ledger.write(LedgerEvent.STARTED, step=0, source="engines", rollout_state={})
        ledger.write(LedgerEvent.FAILED, error="EngineError", message="engine 0 died")
    teller.close()
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "The run failed: EngineError" in text and "python" in json.loads((tmp_path / "environment.json").read_text())


def test_a_report_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    teller = Telling(CFG, tmp_path, print)
    teller.close()  # no metrics, no ledger, no configuration
    assert "report.html could not be written" in caplog.text


def test_the_report_is_refreshed_while_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr(telling.time, "monotonic", lambda: now[0])
    run = shutil.copytree(BROKEN / "all_truncated", tmp_path / "run")
    teller = Telling(CFG, run, print)
    teller.after_step(0, {})
    assert not (run / "report.html").exists()
    now[0] = telling.REPORT_EVERY_S + 1
    teller.after_step(1, {})
    assert (run / "report.html").exists()


def test_fingerprints_and_settings_are_kept_for_a_replay(tmp_path: Path):
    teller = Telling(CFG, tmp_path, print)
    assert teller.wants_fingerprints
    teller.note_start(4, {"model.a": "00"}, {"optimizer": {"lr": {"value": 1e-6, "from": "default"}}})
    teller.note_trained(4, {"model.a": "01"})
    record = read_steps(tmp_path)[4]
    assert (record.before, record.after, record.settings) == ({"model.a": "00"}, {"model.a": "01"}, {"lr": 1e-6})


def test_whoever_outlives_a_killed_driver_writes_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = shutil.copytree(BROKEN / "stale_weights", tmp_path / "run")
    write_last_report(run)
    assert (run / "report.html").is_file()
    write_last_report(tmp_path)  # no run folder: nobody's failure
