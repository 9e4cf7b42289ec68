"""What people see of a run, during and after it."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportConfig:
    """The report, guards against runs that learn nothing, and where else metrics go."""

    report_samples: int = 8
    """Samples of each step to keep for the report and for `rlkit explain`, in `samples/` of the run folder (at most 8;
    about 130 kB a step, 64 MiB in all); 0 keeps none."""
    strict_guards: bool = False
    """End the run with an error where a guard fires, instead of saying it and going on."""
    mismatch_bound: float = 0.1
    """Mean log-prob difference between trainer and engine from which the guard `mismatch` fires and, with
    `--explain-mismatch`, the cause is looked for."""
    explain_mismatch: bool = True
    """When the difference is beyond `--mismatch-bound`, save a checkpoint once and let `rlkit explain` look for the
    cause in a process of its own, on the CPU, while the run goes on."""
    record_for_replay: int = 0
    """Keep what `rlkit replay` needs of the last so many steps in `replay/` of the run folder: batches, and the
    fingerprints of all weights; 0 keeps nothing."""
    use_tensorboard: bool = False
    """Also write TensorBoard event files."""
    tensorboard_dir: str | None = None
    """Folder of the event files; unset means the environment variable TENSORBOARD_DIR, else `tensorboard` in the run
    folder."""
    tb_project_name: str | None = None
    """Folder between `--tensorboard-dir` and the run's; unset means none."""
    tb_experiment_name: str | None = None
    """The run's folder in `--tensorboard-dir`; unset means the name of the run folder."""
    use_mlflow: bool = False
    """Also log to MLflow."""
    mlflow_tracking_uri: str | None = None
    """Server or database of MLflow; unset means the environment variable MLFLOW_TRACKING_URI, else a SQLite file in the
    run folder."""
    mlflow_experiment: str = "rlkit"
    """Name of the experiment there."""
    mlflow_run_name: str | None = None
    """Name of the run there; unset means that of the run folder."""
