"""Inline SVG: line charts, stacked bars and lanes. Colours come from the page's style sheet (classes `c0` ... `c8`), so
that the same picture fits light and dark. Every picture has a title and a description for who cannot see it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

WIDTH, HEIGHT = 420, 190
LEFT, RIGHT, TOP, BOTTOM = 54, 10, 10, 26
MAX_POINTS = 300
NUM_COLORS = 9
"""Classes `c0` ... of the style sheet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One line."""

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    has_dots: bool = False
    """Few points, such as evaluations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Marker:
    """A vertical line at a step."""

    step: float
    label: str


def number(value: float) -> str:
    """Three or four significant digits, without noise."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    size = abs(value)
    if size >= 1e6 or size < 1e-3:
        return f"{value:.2e}".replace("e-0", "e-").replace("e+0", "e")
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def short(value: float) -> str:
    """Three significant digits, for axes and tiles."""
    return number(float(f"{value:.3g}"))


def line_chart(title: str, series: Sequence[Series], *, unit: str = "", markers: Sequence[Marker] = ()) -> str:
    """A figure; empty when there is nothing to draw."""
    drawn = [item for item in series if item.values]
    if not drawn:
        return ""
    low, high = _range([value for item in drawn for value in item.values])
    first = min(min(item.steps) for item in drawn)
    last = max(max(item.steps) for item in drawn)
    x, y = _scale(first, last, LEFT, WIDTH - RIGHT), _scale(low, high, HEIGHT - BOTTOM, TOP)
    parts = [_axes(low, high, first, last, y)]
    for marker in markers:
        if first <= marker.step <= last:
            parts.append(
                f'<line class="mark" x1="{x(marker.step):.1f}" x2="{x(marker.step):.1f}" y1="{TOP}" '
                f'y2="{HEIGHT - BOTTOM}"><title>{escape(marker.label)}</title></line>'
            )
    for place, item in enumerate(drawn):
        points = [(x(step), y(value)) for step, value in _thinned(item.steps, item.values)]
        if len(points) > 1:
            path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
            parts.append(f'<polyline class="line c{place % NUM_COLORS}" points="{path}"/>')
        if item.has_dots or len(points) == 1:
            parts += [
                f'<circle class="dot c{place % NUM_COLORS}" cx="{px:.1f}" cy="{py:.1f}" r="2.6"/>' for px, py in points
            ]
    told = "; ".join(
        f"{item.label}: {number(item.values[0])} at step {item.steps[0]:g}, {number(item.values[-1])} at step "
        f"{item.steps[-1]:g}, between {number(min(item.values))} and {number(max(item.values))}"
        for item in drawn
    )
    legend = "".join(
        f'<span class="key"><i class="swatch c{place % NUM_COLORS}"></i>{escape(item.label)} '
        f"<b>{number(item.values[-1])}</b></span>"
        for place, item in enumerate(drawn)
    )
    caption = f'<figcaption><span class="name">{escape(title)}{f" ({escape(unit)})" if unit else ""}</span>{legend}'
    return _figure(caption + "</figcaption>", f"{title} over steps", told, parts, HEIGHT)


def stacked_bars(title: str, steps: Sequence[int], parts_of: Mapping[str, Sequence[float]], *, unit: str) -> str:
    """One column a step (neighbours averaged where there are many), phases stacked from the bottom."""
    if not steps:
        return ""
    width, height = 2 * WIDTH, 230
    groups = _runs(len(steps), 120)
    columns = {
        name: [sum(values[a:b]) / (b - a) for a, b in groups] for name, values in parts_of.items() if any(values)
    }
    top = max(sum(column[i] for column in columns.values()) for i in range(len(groups))) or 1.0
    x, y = _scale(0, len(groups), LEFT, width - RIGHT), _scale(0, top, height - BOTTOM, TOP)
    shapes = [_axes(0, top, steps[0], steps[-1], y, width=width, height=height)]
    for place, _ in enumerate(groups):
        base = 0.0
        for color, column in enumerate(columns.values()):
            value = column[place]
            if value > 0:
                bar = x(place + 1) - x(place)
                shapes.append(
                    f'<rect class="fill c{color % NUM_COLORS}" x="{x(place):.1f}" y="{y(base + value):.1f}" '
                    f'width="{max(bar - 0.6, 0.4):.1f}" height="{max(y(base) - y(base + value), 0):.1f}"/>'
                )
            base += value
    total = sum(sum(values) for values in parts_of.values()) or 1.0
    shares = {name: sum(parts_of[name]) / total for name in columns}
    legend = "".join(
        f'<span class="key"><i class="swatch c{color % NUM_COLORS}"></i>{escape(name)} <b>{share:.0%}</b></span>'
        for color, (name, share) in enumerate(shares.items())
    )
    told = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    caption = f'<figcaption><span class="name">{escape(title)} ({escape(unit)})</span>{legend}</figcaption>'
    return _figure(caption, title, f"Shares of all time: {told}", shapes, height, width=width, css="wide")


def lanes(title: str, rows: Mapping[str, Sequence[tuple[str, float, float]]], colors: Mapping[str, int]) -> str:
    """Lanes of (phase, begin, end) in seconds; what no phase covers stays empty and is the bubble."""
    end = max((stop for blocks in rows.values() for _, _, stop in blocks), default=0.0)
    if end <= 0:
        return ""
    width, height = 2 * WIDTH, 34 * len(rows) + 34
    x = _scale(0, end, 80, width - RIGHT)
    shapes, told = [], []
    for row, (name, blocks) in enumerate(rows.items()):
        top = 6 + 34 * row
        busy = sum(stop - start for _, start, stop in blocks)
        told.append(f"{name} busy {busy / end:.0%}")
        shapes.append(f'<text class="tick" x="74" y="{top + 17}" text-anchor="end">{escape(name)}</text>')
        shapes.append(f'<rect class="idle" x="80" y="{top}" width="{width - RIGHT - 80}" height="26"/>')
        for phase, start, stop in blocks:
            span = x(stop) - x(start)
            shapes.append(
                f'<rect class="fill c{colors[phase] % NUM_COLORS}" x="{x(start):.1f}" y="{top}" '
                f'width="{max(span, 0.8):.1f}" height="26"><title>{escape(phase)} {stop - start:.2f} s</title></rect>'
            )
    axis = 34 * len(rows) + 22
    for share in (0, 0.25, 0.5, 0.75, 1):
        anchor = "start" if share == 0 else "end" if share == 1 else "middle"
        shapes.append(
            f'<text class="tick" x="{x(share * end):.1f}" y="{axis}" text-anchor="{anchor}">'
            f"{number(share * end)} s</text>"
        )
    used = dict.fromkeys(phase for blocks in rows.values() for phase, _, _ in blocks)
    legend = "".join(
        f'<span class="key"><i class="swatch c{colors[phase] % NUM_COLORS}"></i>{escape(phase)}</span>'
        for phase in used
    )
    legend += '<span class="key"><i class="swatch idle-swatch"></i>idle</span>'
    caption = f'<figcaption><span class="name">{escape(title)}</span>{legend}</figcaption>'
    return _figure(caption, title, "; ".join(told), shapes, height, width=width, css="wide")


def _figure(
    caption: str, title: str, told: str, shapes: Sequence[str], height: int, *, width: int = WIDTH, css: str = ""
) -> str:
    return (
        f'<figure class="{css}">{caption}<svg viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(f"{title}. {told}", quote=True)}"><title>{escape(title)}</title>'
        f"<desc>{escape(told)}</desc>{''.join(shapes)}</svg></figure>"
    )


def _axes(
    low: float, high: float, first: float, last: float, y: "Scale", *, width: int = WIDTH, height: int = HEIGHT
) -> str:
    lines = []
    for value in (low, (low + high) / 2, high):
        lines.append(
            f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
            f'<text class="tick" x="{LEFT - 5}" y="{y(value) + 3.5:.1f}" text-anchor="end">{short(value)}</text>'
        )
    bottom = height - 8
    lines.append(f'<text class="tick" x="{LEFT}" y="{bottom}">step {first:g}</text>')
    if last != first:
        lines.append(f'<text class="tick" x="{width - RIGHT}" y="{bottom}" text-anchor="end">{last:g}</text>')
    return "".join(lines)


class Scale:
    """A linear map of values to pixels."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self._low, self._span = low, (high - low) or 1.0
        self._start, self._length = start, end - start

    def __call__(self, value: float) -> float:
        return self._start + (value - self._low) / self._span * self._length


_scale = Scale


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if low == high:
        margin = abs(low) * 0.1 or 0.5
        return low - margin, high + margin
    return low, high


def _runs(count: int, most: int) -> list[tuple[int, int]]:
    pieces = min(count, most)
    bounds = [round(i * count / pieces) for i in range(pieces + 1)]
    return list(pairwise(bounds))


def _thinned(steps: Sequence[float], values: Sequence[float]) -> list[tuple[float, float]]:
    """All points, or the lowest and the highest of each run of neighbours, so that spikes stay."""
    if len(values) <= MAX_POINTS:
        return list(zip(steps, values, strict=True))
    kept: list[tuple[float, float]] = []
    for start, end in _runs(len(values), MAX_POINTS // 2):
        places = range(start, end)
        chosen = {min(places, key=values.__getitem__), max(places, key=values.__getitem__)}
        kept += [(steps[i], values[i]) for i in sorted(chosen)]
    return kept
