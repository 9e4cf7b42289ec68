"""What a run folder holds, read for the report and for comparisons. A file that is missing or torn leaves a note, never
an error: a report is wanted most when a run went wrong.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import orjson

from rlkit.config.fields import PASS_THROUGH, all_fields
from rlkit.observability.audit import AuditReport, audit
from rlkit.observability.guard_log import FiredGuard, read_guards
from rlkit.observability.ledger import LedgerEvent, LedgerRecord, read_ledger
from rlkit.observability.metrics import read_metrics
from rlkit.observability.sample_files import StepSamples, read_samples, sample_files

T = TypeVar("T")
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One flag of the run."""

    section: str
    name: str
    value: Any
    default: Any
    origin: str
    """`default`, `file x.toml` or `command line`."""

    @property
    def is_changed(self) -> bool:
        return self.value != self.default


@dataclass(kw_only=True, slots=True)
class RunRecord:
    """Everything that the report says comes from here."""

    path: Path
    settings: list[Setting] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    """`metrics.jsonl`: steps and evaluations, each with `step`."""
    num_superseded: int = 0
    """Rows that resumes took back."""
    ledger: list[LedgerRecord] = field(default_factory=list)
    audit: AuditReport | None = None
    guards: list[FiredGuard] = field(default_factory=list)
    samples: list[StepSamples] = field(default_factory=list)
    explanations: list[dict[str, Any]] = field(default_factory=list)
    """Documents of `explain/`, see `rlkit explain`."""
    environment: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """What could not be read."""

    @property
    def steps(self) -> list[Row]:
        """Rows of training steps."""
        return [row for row in self.rows if any(name.startswith(("rollout/", "train/")) for name in row)]

    @property
    def eval_names(self) -> list[str]:
        names = {name for row in self.rows for name in row if name.startswith("eval/") and name.count("/") == 1}
        return sorted(names)

    @property
    def run_events(self) -> list[LedgerRecord]:
        return [record for record in self.ledger if record.event.is_about_the_run]

    def setting(self, name: str) -> Any:
        """The value of a flag; its default where the run did not write one."""
        for item in self.settings:
            if item.name == name:
                return item.value
        default = all_fields()[name].default
        return list(default) if isinstance(default, tuple) else default

    def setting_or_none(self, name: str) -> Any:
        """The same for any name; None for a flag that this version does not know and the run did not write."""
        known = name in all_fields() or any(item.name == name for item in self.settings)
        return self.setting(name) if known else None

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """(steps, values) of one metric; values that were not finite are left out."""
        points = [(row["step"], row[name]) for row in self.rows if row.get(name) is not None]
        return [step for step, _ in points], [value for _, value in points]


def read_run(path: Path) -> RunRecord:
    """FileNotFoundError when the folder holds neither metrics nor a ledger nor a configuration."""
    known = ("metrics.jsonl", "ledger.jsonl", "config.json")
    if not any((path / name).is_file() for name in known):
        raise FileNotFoundError(f"{path} is no run folder: it holds none of {', '.join(known)}")
    run = RunRecord(path=path)
    run.settings = _read(run, "config.json", lambda file: settings_of(json.loads(file.read_text()))) or []
    run.rows = _read(run, "metrics.jsonl", lambda file: list(read_metrics(file))) or []
    superseded = path / "metrics.superseded.jsonl"
    if superseded.is_file():
        run.num_superseded = superseded.read_bytes().count(b"\n")
    torn: list[int] = []
    run.ledger = _read(run, "ledger.jsonl", lambda file: list(read_ledger(file, torn=torn))) or []
    if run.ledger:
        run.audit = _judged(run, torn)
    run.guards = _read(run, "guards.jsonl", read_guards, is_optional=True) or []
    run.environment = _read(run, "environment.json", lambda f: json.loads(f.read_text()), is_optional=True) or {}
    for file in sample_files(path):
        try:
            run.samples.append(read_samples(file))
        except (OSError, ValueError) as error:
            run.notes.append(str(error))
    for file in sorted((path / "explain").glob("*.json")):
        document = _read(run, f"explain/{file.name}", lambda f: orjson.loads(f.read_bytes()))
        if document:
            run.explanations.append(document)
    return run


def settings_of(document: Mapping[str, Any]) -> list[Setting]:
    """From `config.json` (`config.load.to_json`), in the order of the schema."""
    fields = all_fields()
    found: list[Setting] = []
    for section, entries in document.items():
        for name, entry in entries.items():
            if name == PASS_THROUGH and section == "engine":
                found += [
                    Setting(
                        section=section, name=f"sglang_{passed}", value=item["value"], default=None, origin=item["from"]
                    )
                    for passed, item in entry.items()
                ]
            else:
                default = fields[name].default if name in fields else None
                default = list(default) if isinstance(default, tuple) else default
                found.append(
                    Setting(section=section, name=name, value=entry["value"], default=default, origin=entry["from"])
                )
    return found


def drop_counts(run: RunRecord) -> Counter[str]:
    """Reason -> groups or samples left out, over all attempts."""
    counts: Counter[str] = Counter()
    for record in run.ledger:
        if record.event is LedgerEvent.DROPPED:
            counts[record.fields["reason"]] += len(record.fields.get("indices", (0,)))
    return counts


def _read(run: RunRecord, name: str, read: Callable[[Path], T], *, is_optional: bool = False) -> T | None:
    file = run.path / name
    if not file.is_file():
        if not is_optional:
            run.notes.append(f"{name} is not there")
        return None
    try:
        return read(file)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        run.notes.append(f"{name} cannot be read: {error}")
        return None


def _judged(run: RunRecord, torn: list[int]) -> AuditReport | None:
    try:
        return audit(run.ledger, torn_lines=torn)
    except (KeyError, TypeError, ValueError) as error:
        run.notes.append(f"ledger.jsonl lacks a field, so it cannot be audited: {error!r}")
        return None
