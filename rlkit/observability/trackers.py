"""TensorBoard and MLflow as metric sinks. Each package is imported when its sink is made and nowhere else."""

import math
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlkit.config.schema import ReportConfig
from rlkit.observability.report.parts import shown_value

MAX_PARAMETER_CHARS = 500
"""Of a value in MLflow; its servers differ in what they take, this all of them do."""
PARAMETERS_AT_ONCE = 100
_NOT_ALLOWED = re.compile(r"[^0-9A-Za-z_\-./: ]")
"""Characters that MLflow refuses in the name of a metric."""


class TensorBoardSink:
    """Event files for TensorBoard, one scalar a metric and step, under the names of `metrics.jsonl`.

    A resume marks its first step, and TensorBoard drops what older files say of later ones. Written with the package
    `tensorboard` alone, so the driver needs neither torch nor TensorFlow for it.
    """

    def __init__(self, directory: Path, *, start_step: int = 0) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise ImportError(
                "--use-tensorboard needs the package tensorboard: pip install 'rlkit[tensorboard]'"
            ) from error
        events: Any = event_pb2  # made at run time from a description, so its names are not known before
        summaries: Any = summary_pb2
        self._event, self._summary = events.Event, summaries.Summary
        self._writer = EventFileWriter(str(directory))
        start = events.SessionLog(status=events.SessionLog.START)
        self._writer.add_event(self._event(wall_time=time.time(), step=start_step, session_log=start))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))
        self._writer.flush()  # a run that is killed keeps its rows

    def close(self) -> None:
        self._writer.close()


def tensorboard_directory(options: ReportConfig, run_dir: Path) -> Path:
    """`--tensorboard-dir`, else TENSORBOARD_DIR, else the run folder; then project and experiment."""
    root = options.tensorboard_dir or os.environ.get("TENSORBOARD_DIR")
    if root is None and options.tb_project_name is None and options.tb_experiment_name is None:
        return run_dir / "tensorboard"
    base = Path(root) if root is not None else run_dir / "tensorboard"
    if options.tb_project_name is not None:
        base = base / options.tb_project_name
    return base / (options.tb_experiment_name or run_dir.resolve().name)


class MlflowSink:
    """MLflow: settings as parameters, metrics under their names (`@` becomes `_at_`), one run a run folder.

    The id of the run lies in `<run_dir>/mlflow_run_id`, so that a resumed run continues its curves. A value that is not
    finite is left out.
    """

    def __init__(self, options: ReportConfig, run_dir: Path, *, config: Mapping[str, Any]) -> None:
        try:
            from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ImportError("--use-mlflow needs the package mlflow: pip install 'rlkit[mlflow]'") from error
        own = f"sqlite:///{(run_dir / 'mlflow.db').resolve()}"
        uri = options.mlflow_tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or own
        self._client: Any = MlflowClient(tracking_uri=uri)
        path = run_dir / "mlflow_run_id"
        if path.exists():
            self._run_id = path.read_text().strip()
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            name = options.mlflow_experiment
            experiment = self._client.get_experiment_by_name(name)
            experiment_id = experiment.experiment_id if experiment is not None else self._client.create_experiment(name)
            run = self._client.create_run(experiment_id, run_name=options.mlflow_run_name or run_dir.resolve().name)
            self._run_id = run.info.run_id
            path.write_text(self._run_id)
            self._write_settings(config)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        now = int(1000 * time.time())
        rows = [
            Metric(key=_NOT_ALLOWED.sub("_", name.replace("@", "_at_")), value=value, timestamp=now, step=step)
            for name, value in metrics.items()
            if math.isfinite(value)
        ]
        self._client.log_batch(self._run_id, metrics=rows)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)

    def _write_settings(self, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param  # pyright: ignore[reportMissingImports]

        parameters = [
            Param(f"{section}/{name}", shown_value(name, entry["value"])[:MAX_PARAMETER_CHARS])
            for section, entries in config.items()
            for name, entry in entries.items()
            if "value" in entry
        ]
        for start in range(0, len(parameters), PARAMETERS_AT_ONCE):
            self._client.log_batch(self._run_id, params=parameters[start : start + PARAMETERS_AT_ONCE])
