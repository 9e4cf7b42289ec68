import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from rlkit.observability.console import Console
from rlkit.observability.metrics import ConsoleSink, JsonlSink, MetricLog, metric_series, read_metrics
from rlkit.observability.plots import plot_rewards


def test_rows_are_readable_at_once_and_floats_are_exact(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    values = {"train/loss": 0.1 + 0.2, "rollout/reward": 1 / 3, "train/tiny": 5e-324}
    with MetricLog([JsonlSink(path)]) as log:
        log.write(0, values)
        assert list(read_metrics(path)) == [{"step": 0, **values}]  # before close: nothing waits in a buffer
    assert json.loads(path.read_text()) == {"step": 0, **values}


def test_a_value_that_is_not_finite_is_null_and_said_aloud(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "metrics.jsonl"
    with MetricLog([JsonlSink(path)]) as log, caplog.at_level(logging.WARNING):
        log.write(3, {"train/loss": float("nan"), "train/kl": 0.5})
    assert json.loads(path.read_text()) == {"step": 3, "train/loss": None, "train/kl": 0.5}
    assert "step 3" in caplog.text and "train/loss = nan" in caplog.text
    assert metric_series(path, "train/loss") == ([], [])


def test_a_resume_holds_every_step_once_and_loses_nothing(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    with MetricLog([JsonlSink(path)]) as log:
        for step in range(5):
            log.write(step, {"x": float(step)})
    with path.open("a") as file:
        file.write('{"step":5,"x":5')  # torn by a crash
    with MetricLog([JsonlSink(path, start_step=3)]) as log:
        for step in range(3, 6):
            log.write(step, {"x": step + 0.5})
    assert [(row["step"], row["x"]) for row in read_metrics(path)] == [
        (0, 0),
        (1, 1),
        (2, 2),
        (3, 3.5),
        (4, 4.5),
        (5, 5.5),
    ]
    superseded = (tmp_path / "metrics.superseded.jsonl").read_text().splitlines()
    assert superseded == ['{"step":3,"x":3.0}', '{"step":4,"x":4.0}', '{"step":5,"x":5']


def test_rows_survive_sigkill(tmp_path: Path):
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from rlkit.observability.metrics import JsonlSink, MetricLog\n"
        "log = MetricLog([JsonlSink(Path(sys.argv[1]))])\n"
        "for step in range(50): log.write(step, {'x': 1.0})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    path = tmp_path / "metrics.jsonl"
    assert subprocess.run([sys.executable, "-c", code, str(path)]).returncode == -9
    assert [row["step"] for row in read_metrics(path)] == list(range(50))


def test_console_sink_writes_one_line_a_row(capsys: pytest.CaptureFixture[str]):
    with MetricLog([ConsoleSink(Console(total_steps=10))]) as log:
        log.write(0, {"rollout/reward": 0.25})
        log.write(1, {"eval/arith": 0.5, "eval/arith/response_length": 3.0})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [["step", "0/10", "reward", "0.250"], ["eval", "1/10", "arith", "0.500"]]


def test_plot_draws_reward_and_evaluations(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    with MetricLog([JsonlSink(path)]) as log:
        for step in range(4):
            log.write(step, {"rollout/reward": step / 4})
        log.write(4, {"eval/held_out": 0.9, "eval/held_out/unscored": 0.0})
    png = plot_rewards(path, tmp_path / "plots" / "reward.png", title="arith")
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with pytest.raises(ValueError, match="train/nothing"):
        plot_rewards(path, tmp_path / "x.png", title="arith", names=["train/nothing"])


@pytest.mark.parametrize("module", ["spans", "ledger", "metrics", "console", "logs", "plots"])
def test_importing_is_light(module: str):
    heavy = ("torch", "ray", "wandb", "matplotlib")
    code = f"import sys, rlkit.observability.{module}; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
