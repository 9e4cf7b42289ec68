"""`rlkit report RUN_DIR`: write the run's report.html anew, also while it runs or long after."""

import argparse
import sys
from pathlib import Path

from rlkit.observability.report.findings import findings
from rlkit.observability.report.page import write_report
from rlkit.observability.report.record import read_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, help="run folder")
    parser.add_argument("--quiet", action="store_true", help="do not print what looks wrong")


def main(args: argparse.Namespace) -> int:
    """0 when the report is written, 2 when the folder is no run folder."""
    try:
        path = write_report(args.run_dir)
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    if not args.quiet:
        for finding in findings(read_run(args.run_dir)):
            print(f"{finding.severity}: {finding.title}: {finding.evidence}")
    print(f"{path} ({path.stat().st_size / 1e3:.0f} kB)")
    return 0
