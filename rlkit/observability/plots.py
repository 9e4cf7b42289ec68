"""Curves of a run as a PNG, from its `metrics.jsonl`. matplotlib is imported only when a plot is asked for."""

from collections.abc import Sequence
from pathlib import Path

from rlkit.observability.metrics import metric_series, read_metrics


def plot_rewards(metrics_path: Path, png_path: Path, *, title: str, names: Sequence[str] | None = None) -> Path:
    """Draw the mean reward and every evaluation score over the steps; returns `png_path`.

    `names` picks other metrics. A ValueError says so if the file holds none of them.
    """
    # Not pyplot: that keeps global state and looks for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = names if names is not None else ["rollout/reward", *_eval_scores(metrics_path)]
    series = {name: points for name in names if (points := metric_series(metrics_path, name))[0]}
    if not series:
        raise ValueError(f"{metrics_path} holds none of {', '.join(names)}")

    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, (steps, values) in series.items():
        is_eval = name.startswith("eval/")
        axes.plot(steps, values, label=name, marker="o" if is_eval else None, linewidth=1.8 if is_eval else 1.2)
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    png_path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(png_path, dpi=120)
    return png_path


def _eval_scores(metrics_path: Path) -> list[str]:
    names = {
        name for row in read_metrics(metrics_path) for name in row if name.startswith("eval/") and name.count("/") == 1
    }
    return sorted(names)
