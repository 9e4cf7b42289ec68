"""`rlkit audit RUN_DIR`: read the run's ledger and prove its history, or list what is wrong with it."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from rlkit.observability.audit import AuditReport, audit
from rlkit.observability.history import named
from rlkit.observability.ledger import read_ledger


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, help="run folder, or its ledger.jsonl")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def main(args: argparse.Namespace) -> int:
    """0 when the history is proven, 1 when not, 2 when there is no readable ledger."""
    path = args.run_dir if args.run_dir.is_file() else args.run_dir / "ledger.jsonl"
    if not path.is_file():
        print(f"{path} is not there: {args.run_dir} is no run folder", file=sys.stderr)
        return 2
    torn: list[int] = []
    try:
        report = audit(read_ledger(path, torn=torn), torn_lines=torn)
    except (ValueError, KeyError) as error:
        print(f"{path} cannot be read: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps({**asdict(report), "is_proven": report.is_proven}, indent=2))
    else:
        print("\n".join(lines(report)))
    return 0 if report.is_proven else 1


def lines(report: AuditReport) -> list[str]:
    """For people: totals, what was expected, what is wrong."""
    end = "finished" if report.is_finished else "not finished"
    told = [
        f"{report.attempts} attempts ({report.restarts} of them automatic restarts), {end}; "
        f"{report.num_steps} steps from step {report.first_step}",
        f"{report.num_groups} groups: {report.num_trained} trained, {report.num_dropped} dropped, "
        f"{report.num_waiting} waiting",
    ]
    if report.drop_reasons:
        told.append("left out: " + ", ".join(f"{count} {reason}" for reason, count in report.drop_reasons.items()))
    for retrained in report.retrained:
        told.append(
            f"expected: step {retrained.step} ({named('group', retrained.groups)}) was taken back by the start at step "
            f"{retrained.resumed_at}, which trained from an earlier checkpoint"
        )
    if report.torn_lines:
        told.append(f"expected: {named('line', report.torn_lines)} torn by a killed process")
    told += [f"note: {note}" for note in report.notes]
    told += [f"WRONG: {problem}" for problem in report.problems]
    verdict = "proven: nothing skipped, nothing trained twice" if report.is_proven else "NOT PROVEN"
    return [*told, verdict]
