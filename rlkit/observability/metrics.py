"""Metrics of a run, written to sinks: `metrics.jsonl` always, the console and Weights & Biases beside it.

Called by the driver only.

Step numbers: a row of step k holds what step k did (`rollout/...`, `train/...`, `time/...`). An evaluation is a row of
its own, with the number of steps trained before it, so `eval/...` at step k and `train/...` at step k both speak of the
weights that step k starts with.
"""

import logging
import math
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import orjson

from rlkit.observability.console import Console
from rlkit.observability.ledger import write_fully

logger = logging.getLogger(__name__)


class MetricSink(Protocol):
    """Somewhere metrics go."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class MetricLog:
    """Hands every row to every sink, in order. A row is written once: what belongs to a step is collected before."""

    def __init__(self, sinks: Sequence[MetricSink]) -> None:
        self._sinks = list(sinks)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Values become plain floats here; a name whose value is not finite is also named in the process log."""
        row = {name: float(value) for name, value in metrics.items()}
        bad = [f"{name} = {value}" for name, value in row.items() if not math.isfinite(value)]
        if bad:
            logger.warning(f"step {step}: not finite: {', '.join(bad)}")
        for sink in self._sinks:
            sink.write(step, row)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class JsonlSink:
    """`metrics.jsonl`: one JSON object a row, `step` first. Each row is one `write`, so a killed process loses none
    that it wrote.

    A value that is not finite becomes `null` (JSON has no NaN).

    Resume: rows of `start_step` and later are work that the run does again. They leave the file, which thus always
    holds each step once, and are kept in `<name>.superseded.jsonl` beside it. A last line torn by a crash goes the same
    way.
    """

    def __init__(self, path: Path, *, start_step: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _keep_rows_before(path, start_step)
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        write_fully(self._fd, orjson.dumps({"step": step, **metrics}, option=orjson.OPT_APPEND_NEWLINE))

    def close(self) -> None:
        os.close(self._fd)


class ConsoleSink:
    """One aligned line a row."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._console.step_line(step, metrics)

    def close(self) -> None:
        """The console outlives the log."""


class WandbSink:
    """Weights & Biases. The package is imported here and nowhere else, so runs without it need not have it.

    `mode="offline"` writes under `<run_dir>/wandb` and needs neither network nor account. The run id lies in
    `<run_dir>/wandb_id`, so that a resumed run continues its curves; `step` is a logged value and the x-axis, because
    wandb's own counter refuses to go back. wandb's service process ends within 2 s of ours, SIGKILL included (seen with
    0.31.0); detached mode, which would not, is switched off.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        mode: str,
        project: str,
        group: str | None = None,
        team: str | None = None,
        name: str | None = None,
        config: dict[str, Any] | None = None,
    ) -> None:
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ImportError("--use-wandb needs the package wandb: pip install 'rlkit[wandb]'") from error
        os.environ.pop("WANDB_SERVICE", None)  # the address of a detached service that would outlive this process
        id_path = run_dir / "wandb_id"
        if not id_path.exists():
            id_path.write_text(secrets.token_hex(4))
        self._run: Any = wandb.init(
            dir=str(run_dir),
            mode=mode,  # pyright: ignore[reportArgumentType]
            project=project,
            group=group,
            entity=team,
            name=name or run_dir.name,
            id=id_path.read_text().strip(),
            resume="allow" if mode == "online" else None,
            config=config,
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        self._run.finish()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a `metrics.jsonl` in order, each with its `step`; a torn last line is left out, any other bad line
    is a ValueError.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                yield orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not JSON: {error}") from error


def metric_series(path: Path, name: str) -> tuple[list[int], list[float]]:
    """(steps, values) of one metric; rows without it, or with a value that was not finite, are left out."""
    steps, values = [], []
    for row in read_metrics(path):
        if row.get(name) is not None:
            steps.append(row["step"])
            values.append(row[name])
    return steps, values


def _keep_rows_before(path: Path, start_step: int) -> None:
    kept, superseded = [], []
    for line in path.read_bytes().split(b"\n"):
        if not line:
            continue
        try:
            is_kept = orjson.loads(line)["step"] < start_step
        except orjson.JSONDecodeError:
            is_kept = False  # torn by a crash
        (kept if is_kept else superseded).append(line + b"\n")
    if not superseded:
        return
    with path.with_suffix(".superseded.jsonl").open("ab") as file:
        file.writelines(superseded)
    whole = path.with_suffix(".jsonl.tmp")
    whole.write_bytes(b"".join(kept))
    os.replace(whole, path)  # atomic: a crash here leaves the old file or the new one
