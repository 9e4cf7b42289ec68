"""The sinks that a configuration asks for: `metrics.jsonl` and the console always, trackers by flag."""

from pathlib import Path
from typing import Any

from rlkit.config.schema import RunConfig
from rlkit.observability.console import Console
from rlkit.observability.metrics import ConsoleSink, JsonlSink, MetricSink, WandbSink
from rlkit.observability.trackers import MlflowSink, TensorBoardSink, tensorboard_directory


def open_sinks(
    cfg: RunConfig, run_dir: Path, console: Console, *, start_step: int, config_json: dict[str, Any]
) -> list[MetricSink]:
    """In the order in which a row is handed to them. ImportError names the extra of a package that is not there."""
    sinks: list[MetricSink] = [JsonlSink(run_dir / "metrics.jsonl", start_step=start_step), ConsoleSink(console)]
    options = cfg.logging
    if options.use_wandb:
        wandb = WandbSink(
            run_dir,
            mode=options.wandb_mode,
            project=options.wandb_project,
            group=options.wandb_group,
            team=options.wandb_team,
            name=options.wandb_run_name,
            config=config_json,
        )
        sinks.append(wandb)
    if cfg.report.use_tensorboard:
        sinks.append(TensorBoardSink(tensorboard_directory(cfg.report, run_dir), start_step=start_step))
    if cfg.report.use_mlflow:
        sinks.append(MlflowSink(cfg.report, run_dir, config=config_json))
    return sinks
