"""A comparison of two runs as one HTML file without any network."""

from html import escape

from rlkit.config.fields import flag_of
from rlkit.observability.report.charts import Marker, Series, line_chart
from rlkit.observability.report.comparison import Comparison
from rlkit.observability.report.page import CHARTS
from rlkit.observability.report.parts import details, page_of, shown_value, table


def render_comparison(comparison: Comparison) -> str:
    """The page."""
    first, second = labels(comparison)
    parted = comparison.diverges_at
    markers = [Marker(step=parted, label=f"first difference: step {parted}")] if parted is not None else []
    charts = []
    names = [(title, unit, parts[0][0]) for title, unit, parts in CHARTS]
    evals = sorted({*comparison.first.eval_names, *comparison.second.eval_names})
    for title, unit, name in [*((f"Evaluation {name}", "", name) for name in evals), *names]:
        series = []
        for label, run in ((first, comparison.first), (second, comparison.second)):
            steps, values = run.series(name)
            series.append(Series(label=label, steps=steps, values=values, has_dots=name.startswith("eval/")))
        charts.append(line_chart(title, series, unit=unit, markers=markers))
    settings = [
        [flag_of(item.name), shown_value(item.name, item.first), shown_value(item.name, item.second)]
        for item in comparison.settings
    ]
    rows = [[m.name, *m.first_last, *m.means, m.diverges_at] for m in comparison.metrics]
    head = ["metric", f"last, {first}", f"last, {second}", f"mean, {first}", f"mean, {second}", "first difference"]
    sections = [
        ("verdict", "First difference", f"<p>{escape(verdict(comparison))}</p>"),
        (
            "settings",
            "Settings that differ",
            table("Values in both runs", ["flag", first, second], settings) or "<p>None.</p>",
        ),
        ("curves", "Curves", f'<div class="charts">{"".join(charts)}</div>'),
        ("metrics", "Metrics", details("All metrics", table("At common steps", head, rows, numeric=range(1, 6)))),
    ]
    return page_of(f"{first} and {second}", f"{len(comparison.steps)} common steps", sections)


def labels(comparison: Comparison) -> tuple[str, str]:
    """Names of the two runs: of their folders, with parents where those are the same."""
    first, second = comparison.first.path.resolve(), comparison.second.path.resolve()
    if first.name != second.name:
        return first.name, second.name
    return f"{first.parent.name}/{first.name}", f"{second.parent.name}/{second.name}"


def verdict(comparison: Comparison) -> str:
    """One sentence."""
    if not comparison.steps:
        return "the runs have no step in common"
    parted = comparison.diverges_at
    if parted is None:
        return f"the runs are the same at all {len(comparison.steps)} common steps"
    told = []
    for metric in comparison.diverging_first[:4]:
        assert metric.values_there is not None
        told.append(f"{metric.name} {metric.values_there[0]:.6g} and {metric.values_there[1]:.6g}")
    more = len(comparison.diverging_first) - len(told)
    return f"the runs part at step {parted}: {', '.join(told)}{f', and {more} more metrics' if more > 0 else ''}"
