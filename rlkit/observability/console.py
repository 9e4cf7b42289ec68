"""What a person sees: one aligned line a step, a progress bar while samples are generated, a curve at the end.

Everything else goes to `logs/`. On a pipe there is no bar, no colour and no cursor movement: the same lines, plain.
"""

import io
import math
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_BLOCKS = "▁▂▃▄▅▆▇█"
_GAP = "  "


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One value of the step line; left out of a line whose metrics lack it."""

    metric: str
    label: str
    spec: str
    """Format specification with a width, so that lines stay aligned."""
    unit: str = ""
    scale: float = 1.0
    unless: str | None = None
    """Left out too where this metric is present, which says more."""


STEP_COLUMNS = (
    Column(metric="rollout/reward", label="reward", spec="6.3f"),
    Column(metric="rollout/response_length", label="len", spec="7.1f"),
    Column(metric="rollout/truncated_ratio", label="cut", spec="5.1f", unit="%", scale=100.0),
    Column(metric="train/loss", label="loss", spec="7.4f", unless="rollout/reward"),
    Column(metric="train/kl_loss", label="kl", spec="7.4f"),
    Column(metric="train/entropy", label="entropy", spec="6.3f"),
    Column(metric="train/grad_norm", label="grad", spec="7.3f"),
    Column(metric="time/generate_s", label="gen", spec="5.1f", unit="s"),
    Column(metric="time/train_s", label="train", spec="5.1f", unit="s"),
    Column(metric="time/sync_s", label="sync", spec="4.1f", unit="s"),
    Column(metric="time/step_s", label="total", spec="5.1f", unit="s"),
)


def format_step(step: int, metrics: Mapping[str, float], *, total_steps: int | None = None) -> str:
    """The line of a step (`step  12/100  reward  0.630 ...`) or of an evaluation (`eval  12/100  <name>  0.871`)."""
    width = len(str(total_steps)) if total_steps else 4
    place = f"{step:>{width}}/{total_steps}" if total_steps else f"{step:>{width}}"
    parts = [
        f"{column.label} {metrics[column.metric] * column.scale:{column.spec}}{column.unit}"
        for column in STEP_COLUMNS
        if column.metric in metrics and column.unless not in metrics
    ]
    evals = [f"{name.removeprefix('eval/')} {metrics[name]:6.3f}" for name in metrics if _is_eval_score(name)]
    is_evaluation = evals and not any(name.startswith(("rollout/", "train/")) for name in metrics)
    return _GAP.join([f"{'eval' if is_evaluation else 'step'} {place}", *parts, *evals])


def _is_eval_score(name: str) -> bool:
    return name.startswith("eval/") and name.count("/") == 1


def sparkline(values: Sequence[float], *, width: int = 60) -> str:
    """Values as one line of block characters between their minimum and maximum, averaged down to `width` characters."""
    points = _resample([v for v in values if math.isfinite(v)], width)
    if not points:
        return ""
    low, high = min(points), max(points)
    span = (high - low) or 1.0
    return "".join(_BLOCKS[min(len(_BLOCKS) - 1, int((v - low) / span * len(_BLOCKS)))] for v in points)


def curve(values: Sequence[float], *, title: str, width: int = 60, height: int = 8) -> str:
    """A text plot: value axis on the left, one column a value (averaged down to `width`), in eighths of a line. Empty
    input gives "".
    """
    points = _resample([v for v in values if math.isfinite(v)], width)
    if not points:
        return ""
    low, high = min(points), max(points)
    if high == low:
        low, high = low - 0.5, high + 0.5
    eighths = [round((v - low) / (high - low) * (height * 8 - 1)) + 1 for v in points]
    lines = [title]
    for row in range(height - 1, -1, -1):
        cells = "".join(_cell(filled - row * 8) for filled in eighths)
        edge = low + (high - low) * row / (height - 1) if height > 1 else high
        lines.append(f"{edge:8.3f} ┤{cells}")
    lines.append(f"{'':8} └{'─' * len(points)}")
    lines.append(f"{'':10}1{len(values):>{max(len(points) - 1, 1)}}")
    return "\n".join(lines)


def _cell(eighths: int) -> str:
    return " " if eighths <= 0 else _BLOCKS[min(eighths, 8) - 1]


def _resample(values: Sequence[float], width: int) -> list[float]:
    """At most `width` means of consecutive runs of values."""
    if len(values) <= width:
        return list(values)
    bounds = [round(i * len(values) / width) for i in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]


class ProgressBar(Protocol):
    def update(self, num_done: int, num_total: int | None = None) -> None:
        """Show `num_done` finished items; the total may become known late."""
        ...


class _NoBar:
    def update(self, num_done: int, num_total: int | None = None) -> None:
        """Nothing to draw on."""


class _RichBar:
    def __init__(self, progress: Progress, label: str, num_total: int | None) -> None:
        self._progress = progress
        self._task = progress.add_task(label, total=num_total)

    def update(self, num_done: int, num_total: int | None = None) -> None:
        if num_total is None:
            self._progress.update(self._task, completed=num_done)
        else:
            self._progress.update(self._task, completed=num_done, total=num_total)


class Console:
    """The one writer to the terminal. `total_steps` is only for the `12/100` of the step lines."""

    def __init__(self, *, total_steps: int | None = None, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        if isinstance(self._stream, io.TextIOWrapper):
            self._stream.reconfigure(errors="replace")  # an ASCII terminal shows ? for a curve; it does not end the run
        self._total_steps = total_steps
        self._is_terminal = self._stream.isatty()
        self._rich = RichConsole(file=self._stream, highlight=False)

    def say(self, text: str) -> None:
        """Print lines as they are."""
        if self._is_terminal:
            self._rich.print(text, markup=False, soft_wrap=True)  # through rich: an open bar moves out of the way
        else:
            print(text, file=self._stream, flush=True)

    def step_line(self, step: int, metrics: Mapping[str, float]) -> None:
        self.say(format_step(step, metrics, total_steps=self._total_steps))

    def show_curve(self, values: Sequence[float], *, title: str, height: int = 8) -> None:
        columns = shutil.get_terminal_size((80, 24)).columns if self._is_terminal else 80
        self.say(curve(values, title=title, width=max(10, min(100, columns - 12)), height=height))

    @contextmanager
    def progress(self, label: str, *, num_total: int | None = None) -> Iterator[ProgressBar]:
        """A bar that is gone when the block ends; on a pipe, nothing."""
        if not self._is_terminal:
            yield _NoBar()
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._rich, transient=True, refresh_per_second=5) as progress:
            yield _RichBar(progress, label, num_total)
