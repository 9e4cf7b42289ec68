"""Two runs side by side: settings that differ, metrics at common steps, the first step at which each metric parts.

Pure but for reading the run folders; `cli/compare.py` prints it, `comparison_page.py` draws it.
"""

import math
from dataclasses import dataclass
from typing import Any

from rlkit.observability.report.record import RunRecord

TOLERANCE = 1e-6
"""Relative difference from which two values are not the same; equal runs on a CPU agree to the last bit."""
DETERMINED = ("rollout/", "train/", "eval/")
"""Prefixes of metrics that settings and seeds determine; times and memory differ between equal runs."""
NOT_COMPARED = frozenset({"output_dir", "save", "load", "wandb_run_name", "tensorboard_dir", "mlflow_run_name"})
"""Settings that name places."""
MEASURED = ("rollout/tokens_per_s",)


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingDifference:
    name: str
    first: Any
    second: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricDifference:
    """One metric over the common steps."""

    name: str
    num_steps: int
    first_last: tuple[float, float]
    """Values of both runs at the last common step."""
    means: tuple[float, float]
    diverges_at: int | None
    """First common step at which they are not the same; None where they never are."""
    values_there: tuple[float, float] | None

    @property
    def is_determined(self) -> bool:
        return self.name.startswith(DETERMINED) and self.name not in MEASURED


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    first: RunRecord
    second: RunRecord
    settings: list[SettingDifference]
    steps: list[int]
    """Training steps that both have."""
    metrics: list[MetricDifference]
    only_first: list[str]
    """Metrics that only one of them has."""
    only_second: list[str]

    @property
    def diverges_at(self) -> int | None:
        """First step at which a metric that settings determine differs."""
        places = [m.diverges_at for m in self.metrics if m.is_determined and m.diverges_at is not None]
        return min(places, default=None)

    @property
    def diverging_first(self) -> list[MetricDifference]:
        """The metrics that part at that step, in the order in which a step makes them."""
        return [m for m in self.metrics if m.is_determined and m.diverges_at == self.diverges_at is not None]


def compare(first: RunRecord, second: RunRecord, *, tolerance: float = TOLERANCE) -> Comparison:
    """Settings and metrics of two runs."""
    ours, theirs = _by_step(first), _by_step(second)
    names = list(dict.fromkeys(name for table in (ours, theirs) for row in table.values() for name in row))
    in_first = {name for row in ours.values() for name in row}
    in_second = {name for row in theirs.values() for name in row}
    metrics = [m for name in names if (m := _metric(name, ours, theirs, tolerance)) is not None]
    common = {row["step"] for row in first.steps} & {row["step"] for row in second.steps}
    return Comparison(
        first=first,
        second=second,
        settings=_settings(first, second),
        steps=sorted(common),
        metrics=metrics,
        only_first=sorted(in_first - in_second),
        only_second=sorted(in_second - in_first),
    )


def _by_step(run: RunRecord) -> dict[int, dict[str, float]]:
    """Step -> all metrics of that step; evaluations join the step of the same number."""
    table: dict[int, dict[str, float]] = {}
    for row in run.rows:
        values = {name: math.nan if value is None else value for name, value in row.items() if name != "step"}
        table.setdefault(row["step"], {}).update(values)
    return table


def _metric(
    name: str, ours: dict[int, dict[str, float]], theirs: dict[int, dict[str, float]], tolerance: float
) -> MetricDifference | None:
    steps = [step for step in sorted(ours) if step in theirs and name in ours[step] and name in theirs[step]]
    if not steps:
        return None
    pairs = [(ours[step][name], theirs[step][name]) for step in steps]
    parted = next((i for i, (a, b) in enumerate(pairs) if not _same(a, b, tolerance)), None)
    return MetricDifference(
        name=name,
        num_steps=len(steps),
        first_last=pairs[-1],
        means=(math.fsum(a for a, _ in pairs) / len(pairs), math.fsum(b for _, b in pairs) / len(pairs)),
        diverges_at=None if parted is None else steps[parted],
        values_there=None if parted is None else pairs[parted],
    )


def _same(first: float, second: float, tolerance: float) -> bool:
    if math.isnan(first) or math.isnan(second):
        return math.isnan(first) and math.isnan(second)
    return abs(first - second) <= tolerance * max(abs(first), abs(second))


def _settings(first: RunRecord, second: RunRecord) -> list[SettingDifference]:
    ours = {item.name: item.value for item in first.settings}
    theirs = {item.name: item.value for item in second.settings}
    names = [name for name in dict.fromkeys([*ours, *theirs]) if name not in NOT_COMPARED]
    return [
        SettingDifference(name=name, first=first.setting_or_none(name), second=second.setting_or_none(name))
        for name in names
        if first.setting_or_none(name) != second.setting_or_none(name)
    ]
