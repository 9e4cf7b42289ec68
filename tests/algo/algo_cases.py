"""Reads bug cases by their id."""

import json
from pathlib import Path
from typing import Any

CASES = Path(__file__).parents[1] / "data" / "cases.jsonl"


def case(case_id: str) -> dict[str, Any]:
    rows = (json.loads(line) for line in CASES.read_text(encoding="utf-8").split("\n") if line)
    return next(row for row in rows if row["id"] == case_id)
