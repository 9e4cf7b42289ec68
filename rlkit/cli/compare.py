"""`rlkit compare A B`: two run folders side by side, in the terminal and with `--html` as a page."""

import argparse
import sys
from pathlib import Path

from rlkit.config.fields import flag_of
from rlkit.observability.report.charts import number
from rlkit.observability.report.comparison import TOLERANCE, Comparison, compare
from rlkit.observability.report.comparison_page import labels, render_comparison, verdict
from rlkit.observability.report.parts import shown_value
from rlkit.observability.report.record import read_run

SHOWN = (
    "rollout/reward",
    "rollout/response_length",
    "rollout/truncated_ratio",
    "train/loss",
    "train/entropy",
    "train/ppo_kl",
    "train/kl_loss",
    "train/grad_norm",
    "train/train_rollout_logprob_abs_diff",
    "rollout/tokens_per_s",
    "time/generate_s",
    "time/train_s",
    "time/sync_s",
    "time/step_s",
)
"""What the terminal shows without `--all`; evaluations always."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", type=Path, help="run folder")
    parser.add_argument("second", type=Path, help="run folder")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page with both runs' curves")
    parser.add_argument("--all", action="store_true", help="show every metric")
    parser.add_argument(
        "--tolerance", type=float, default=TOLERANCE, help=f"relative difference that counts (default {TOLERANCE:g})"
    )


def main(args: argparse.Namespace) -> int:
    """0 when both were read (equal or not), 2 when one is no run folder."""
    try:
        comparison = compare(read_run(args.first), read_run(args.second), tolerance=args.tolerance)
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(lines(comparison, show_all=args.all)))
    if args.html is not None:
        args.html.write_text(render_comparison(comparison), encoding="utf-8")
        print(f"\n{args.html}")
    return 0


def lines(comparison: Comparison, *, show_all: bool = False) -> list[str]:
    """The terminal's view."""
    first, second = labels(comparison)
    told: list[str] = []
    if comparison.settings:
        rows = [["setting", first, second]]
        rows += [
            [flag_of(item.name), shown_value(item.name, item.first), shown_value(item.name, item.second)]
            for item in comparison.settings
        ]
        told += [*_aligned(rows), ""]
    else:
        told += ["no setting differs", ""]
    shown = [m for m in comparison.metrics if show_all or m.name in SHOWN or _is_score(m.name)]
    if shown:
        rows = [["metric", "last, 1st", "last, 2nd", "mean, 1st", "mean, 2nd", "parts at"]]
        rows += [
            [m.name, *map(number, (*m.first_last, *m.means)), "-" if m.diverges_at is None else str(m.diverges_at)]
            for m in shown
        ]
        told += [f"{len(comparison.steps)} common steps", *_aligned(rows, right=True), ""]
    for label, names in ((first, comparison.only_first), (second, comparison.only_second)):
        if names:
            told.append(f"only in {label}: {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}")
    return [*told, verdict(comparison)]


def _is_score(name: str) -> bool:
    return name.startswith("eval/") and name.count("/") == 1


def _aligned(rows: list[list[str]], *, right: bool = False) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if right and column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
