"""What `rlkit replay` needs of a step, in `replay/` of the run folder (`--record-for-replay N`).

    rollout_12.jsonl        the batch, as `--save-debug-rollout-data` writes it
    steps.jsonl             two lines a step: the digest of each group when the rollout was made, and the fingerprint of
                            every tensor after it; at the first step of an attempt also before it, with all settings

Batches of the last N steps are kept, and all lines. The rollout manager and the driver write, `rlkit replay` reads.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from rlkit.observability.ledger import end_last_line, write_fully

FOLDER = "replay"
_BATCH = "rollout_{step}.jsonl"


@dataclass(kw_only=True, slots=True)
class StepRecord:
    """What was written down about a step."""

    groups: dict[int, str] = field(default_factory=dict[int, str])
    """Group id -> digest of all that the group held when it was generated."""
    before: dict[str, str] = field(default_factory=dict[str, str])
    """Tensor -> fingerprint before the step; for the first step of an attempt only."""
    after: dict[str, str] = field(default_factory=dict[str, str])
    """The same after it."""
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    """Every setting, by name; for the first step of an attempt only."""


def batch_path(run_dir: Path, step: int) -> Path:
    return run_dir / FOLDER / _BATCH.format(step=step)


def batch_template(run_dir: Path) -> str:
    """As `--load-debug-rollout-data` spells it."""
    return str(run_dir / FOLDER / "rollout_{rollout_id}.jsonl")


def keep_newest(run_dir: Path, step: int, count: int) -> None:
    """Delete batches older than the last `count` steps up to `step`."""
    for path in (run_dir / FOLDER).glob("rollout_*.jsonl"):
        if int(path.stem.removeprefix("rollout_")) <= step - count:
            path.unlink()


def digest(fields: Any) -> str:
    """16 hex digits of a group as it is written."""
    data = orjson.dumps(fields, default=str, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SORT_KEYS)
    return hashlib.sha256(data).hexdigest()[:16]


def note_groups(run_dir: Path, step: int, groups: Mapping[int, str]) -> None:
    _append(run_dir, {"step": step, "groups": groups})


def note_start(run_dir: Path, step: int, *, before: Mapping[str, str], settings: Mapping[str, Any]) -> None:
    """At the first step of an attempt: the tensors that it begins with, and every setting."""
    _append(run_dir, {"step": step, "before": before, "settings": settings})


def note_tensors(run_dir: Path, step: int, after: Mapping[str, str]) -> None:
    _append(run_dir, {"step": step, "after": after})


def read_steps(run_dir: Path) -> dict[int, StepRecord]:
    """By step. Where a step was made several times, the last time counts."""
    path = run_dir / FOLDER / "steps.jsonl"
    found: dict[int, StepRecord] = {}
    for line in path.read_bytes().split(b"\n") if path.is_file() else ():
        try:
            fields = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue  # the empty end, or a line torn by a crash
        record = found.setdefault(fields["step"], StepRecord())
        if "groups" in fields:
            record.groups = {int(number): value for number, value in fields["groups"].items()}
        record.before = fields.get("before", record.before)
        record.settings = fields.get("settings", record.settings)
        record.after = fields.get("after", record.after)
    return found


def steps_with_batches(run_dir: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("rollout_")) for path in (run_dir / FOLDER).glob("rollout_*.jsonl"))


def changed_groups(recorded: Mapping[int, str], found: Mapping[int, str]) -> Sequence[str]:
    """What differs between the batch that was recorded and the one that is there, a sentence each."""
    missing = sorted(recorded.keys() - found.keys())
    added = sorted(found.keys() - recorded.keys())
    other = sorted(number for number in recorded.keys() & found.keys() if recorded[number] != found[number])
    told = [f"group {number} is missing" for number in missing]
    told += [f"group {number} was not there" for number in added]
    return told + [f"group {number} has other content" for number in other]


def _append(run_dir: Path, line: Mapping[str, Any]) -> None:
    path = run_dir / FOLDER / "steps.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    end_last_line(path)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        write_fully(descriptor, orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS))
    finally:
        os.close(descriptor)
