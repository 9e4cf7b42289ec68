"""TensorBoard and MLflow say what metrics.jsonl says, also after a resume; a missing package is named."""

import io
import sys
from pathlib import Path

import pytest

from rlkit.config.schema import ReportConfig, RunConfig
from rlkit.observability.console import Console
from rlkit.observability.metrics import MetricLog
from rlkit.observability.sinks import open_sinks
from rlkit.observability.trackers import MlflowSink, TensorBoardSink, tensorboard_directory


def test_without_the_package_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)
    with pytest.raises(ImportError, match=r"pip install 'rlkit\[tensorboard\]'"):
        TensorBoardSink(tmp_path)
    monkeypatch.setitem(sys.modules, "mlflow.tracking", None)
    with pytest.raises(ImportError, match=r"pip install 'rlkit\[mlflow\]'"):
        MlflowSink(ReportConfig(), tmp_path, config={})


def test_event_files_hold_every_row_once_also_after_a_resume(tmp_path: Path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for start, value in ((0, 1.0), (2, 5.0)):
        with MetricLog([TensorBoardSink(tmp_path, start_step=start)]) as log:
            for step in range(start, 4):
                log.write(step, {"rollout/reward": value + step, "eval/toy/pass@1": 0.5})
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"rollout/reward", "eval/toy/pass@1"}
    found = [(event.step, event.value) for event in events.Scalars("rollout/reward")]
    assert found == [(0, 1.0), (1, 2.0), (2, 7.0), (3, 8.0)]


@pytest.mark.parametrize(
    "options, environment, expected",
    [
        ({}, None, "{run}/tensorboard"),
        ({"tensorboard_dir": "/tb"}, None, "/tb/run"),
        ({}, "/shared", "/shared/run"),
        ({"tensorboard_dir": "/tb", "tb_project_name": "p", "tb_experiment_name": "e"}, "/shared", "/tb/p/e"),
        ({"tb_experiment_name": "e"}, None, "{run}/tensorboard/e"),
    ],
)
def test_where_event_files_go(options, environment, expected, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    if environment is not None:
        monkeypatch.setenv("TENSORBOARD_DIR", environment)
    run = tmp_path / "run"
    assert str(tensorboard_directory(ReportConfig(**options), run)) == expected.format(run=run)


def test_mlflow_holds_settings_and_metrics_and_continues_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    from mlflow.tracking import MlflowClient

    config = {"optimizer": {"lr": {"value": 1e-6, "from": "command line"}}}
    for steps in (range(2), range(2, 3)):
        with MetricLog([MlflowSink(ReportConfig(mlflow_experiment="toy"), tmp_path, config=config)]) as log:
            for step in steps:
                log.write(step, {"rollout/reward": 0.5 + step, "eval/toy/pass@2": 1.0, "train/loss": float("nan")})
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    run = client.get_run((tmp_path / "mlflow_run_id").read_text())
    assert run.data.params["optimizer/lr"] == "1e-06" and run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "rollout/reward")
    assert sorted((metric.step, metric.value) for metric in history) == [(0, 0.5), (1, 1.5), (2, 2.5)]
    assert "eval/toy/pass_at_2" in run.data.metrics and "train/loss" not in run.data.metrics


def test_flags_decide_which_trackers_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("tensorboard")
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    for is_asked in (False, True):
        cfg = RunConfig(report=ReportConfig(use_tensorboard=is_asked))
        run = tmp_path / str(is_asked)
        sinks = open_sinks(cfg, run, Console(stream=io.StringIO()), start_step=0, config_json={})
        MetricLog(sinks).close()
        assert (run / "tensorboard").is_dir() == is_asked and (run / "metrics.jsonl").is_file()
