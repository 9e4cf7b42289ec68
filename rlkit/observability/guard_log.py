"""Guards that fired, as a file: `guards.jsonl` in the run folder, one line a firing. `observability/guards.py` decides,
the report reads.
"""

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from rlkit.observability.ledger import end_last_line, write_fully

NAME = "guards.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class FiredGuard:
    """One guard, at the step at which its evidence was complete."""

    step: int
    guard: str
    """Its name, such as `all_truncated`."""
    evidence: str
    """A sentence with the numbers."""
    remedy: str
    """What usually helps."""

    @property
    def message(self) -> str:
        return f"{self.guard}: {self.evidence}. {self.remedy}"


def append_guard(run_dir: Path, fired: FiredGuard) -> None:
    """One `write`, so that a killed run keeps it."""
    path = run_dir / NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    end_last_line(path)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        line = {"time": round(time.time(), 3), **asdict(fired)}
        write_fully(descriptor, orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
    finally:
        os.close(descriptor)


def read_guards(path: Path) -> list[FiredGuard]:
    """In the order of firing; a torn last line is left out."""
    found = []
    for line in path.read_bytes().split(b"\n"):
        try:
            fields = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue  # the empty end, or a line torn by a crash
        found.append(FiredGuard(**{name: fields[name] for name in ("step", "guard", "evidence", "remedy")}))
    return found
