"""Proof from a ledger that no prompt was skipped or trained twice, also across restarts. Pure; called by
`cli/audit.py`, and by the session before it resumes.

A start or resume takes back what its checkpoint does not hold: steps after it are trained again, which is expected and
named; groups that it had not yet issued are issued again and must be the same prompts. What is left over all attempts,
the effective history, has to satisfy:

* group ids count up without a gap, and draws from the prompt file join end to beginning;
* no row of an epoch is issued twice;
* every group of a finished step was kept or dropped, and every kept one was trained, in one step and only once;
* the samples trained in a step are those of its groups, less the dropped ones;
* no response was made by weights that are unknown or newer than those that trained on it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlkit.observability.history import GroupHistory, History, Retrained, is_settled, named
from rlkit.observability.ledger import LedgerRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditReport:
    """What the history of a run amounts to. It is proven when `problems` is empty."""

    attempts: int
    restarts: int
    """Of the attempts, those that a supervisor started."""
    is_finished: bool
    first_step: int
    num_steps: int
    """Steps whose training is part of the weights."""
    num_groups: int
    num_trained: int
    num_dropped: int
    num_waiting: int
    """Issued, neither trained nor dropped: buffered, or in flight when the run ended."""
    drop_reasons: dict[str, int]
    """Reason -> samples (groups where a group was dropped whole)."""
    retrained: list[Retrained]
    torn_lines: list[int]
    notes: list[str]
    problems: list[str]

    @property
    def is_proven(self) -> bool:
        return not self.problems


def audit(records: Iterable[LedgerRecord], *, torn_lines: Sequence[int] = ()) -> AuditReport:
    """Read the whole history and judge it. `torn_lines` may still be filled while `records` is read."""
    history = History()
    for record in records:
        history.add(record)
    if history.attempts == 0:
        history.problems.append("the ledger has no start: it is empty, or its beginning is lost")
    return Judge(history).report(torn_lines)


def disagreements(records: Iterable[LedgerRecord], *, step: int, rollout_state: Mapping[str, Any]) -> list[str]:
    """What speaks against continuing this run from the checkpoint of `step` that holds `rollout_state`, a sentence
    each. Empty also for a ledger without events.
    """
    history = History()
    for record in records:
        history.add(record)
    if history.attempts == 0:
        return []
    before = len(history.problems)
    history.begin({"step": step + 1, "checkpoint_step": step, "rollout_state": rollout_state})
    return history.problems[before:]


class Judge:
    """Finds in an effective history what must not be there; problems are added to the history's own."""

    def __init__(self, history: History) -> None:
        self._history = history

    def report(self, torn_lines: Sequence[int]) -> AuditReport:
        is_replay = self._history.source == "replay"
        if not is_replay:
            self._check_ids()
        last = max(self._history.trained, default=-1)
        self._check_steps(last)
        for group in self._history.groups.values():
            self._check_group(group, last, is_replay=is_replay)
        self._check_sample_counts()
        reasons: Counter[str] = Counter()
        for group in self._history.groups.values():
            for reason, count in group.dropped.items():
                reasons[reason] += 1 if count is None else count
        trained = sum(bool(group.trained_steps) for group in self._history.groups.values())
        waiting = sum(not is_settled(group) for group in self._history.groups.values())
        return AuditReport(
            attempts=self._history.attempts,
            restarts=self._history.restarts,
            is_finished=self._history.is_finished,
            first_step=self._history.first_step,
            num_steps=len(self._history.trained),
            num_groups=len(self._history.groups),
            num_trained=trained,
            num_dropped=len(self._history.groups) - trained - waiting,
            num_waiting=waiting,
            drop_reasons=dict(reasons),
            retrained=self._history.retrained,
            torn_lines=list(torn_lines),
            notes=self._history.notes,
            problems=self._history.problems,
        )

    def _check_ids(self) -> None:
        last = max(self._history.groups, default=self._history.first_group - 1)
        missing = [
            number for number in range(self._history.first_group, last + 1) if number not in self._history.groups
        ]
        if missing:
            self._history.problems.append(f"{named('group', missing)} never issued, although later ones were")
        num_issued = sum(group.issued is not None for group in self._history.groups.values())
        if num_issued > self._history.num_drawn:
            self._history.problems.append(
                f"{num_issued} groups were issued, but only {self._history.num_drawn} were drawn from the prompt file"
            )
        rows: dict[tuple[int, int], list[int]] = {}
        for group in self._history.groups.values():
            if group.issued is not None:
                rows.setdefault((group.issued["epoch"], group.issued["position"]), []).append(group.group)
        for (epoch, row), groups in rows.items():
            if len(groups) > 1:
                self._history.problems.append(f"row {row} of epoch {epoch} was issued as groups {groups}")

    def _check_steps(self, last: int) -> None:
        missing = sorted(set(range(min(self._history.trained, default=0), last + 1)) - self._history.trained.keys())
        if missing:
            self._history.problems.append(f"{named('step', missing)} never trained, although later ones were")

    def _check_group(self, group: GroupHistory, last: int, *, is_replay: bool) -> None:
        who = f"group {group.group}"
        if len(group.trained_steps) > 1 and not is_replay:
            self._history.problems.append(f"{who} was trained in steps {group.trained_steps}")
        if group.trained_steps and group.kept_step is None:
            self._history.problems.append(
                f"{who} was trained in step {group.trained_steps[0]} without having been kept"
            )
        if group.issued is None:
            if not is_replay:
                self._history.problems.append(f"{who} has events but was never issued")
            return
        is_due = self._history.is_finished or (group.kept_step is not None and group.kept_step <= last)
        if group.kept_step is not None and not group.trained_steps and is_due and self._history.trained:
            self._history.problems.append(f"{who} was kept in step {group.kept_step} and never trained")
        has_outcome = is_settled(group) or group.kept_step is not None or group.buffered_step is not None
        # a pool may hold a group over any number of steps; at its end it says so of each that is left
        may_be_held = "pooled" in group.issued and not self._history.is_finished
        if not has_outcome and not may_be_held and group.issued["step"] <= last:
            self._history.problems.append(
                f"{who} was issued in step {group.issued['step']} and neither kept nor dropped: it was skipped"
            )
        is_complete = group.generated is not None and group.is_graded
        if group.trained_steps and self._history.source == "engines" and not is_complete:
            self._history.problems.append(f"{who} was trained without having been generated and graded")
        self._check_versions(group)

    def _check_versions(self, group: GroupHistory) -> None:
        if group.generated is None or not group.trained_steps:
            return
        for index, (versions, length) in enumerate(
            zip(group.generated["versions"], group.generated["lengths"], strict=True)
        ):
            if length and (not versions or min(versions) < 0):
                self._history.problems.append(
                    f"sample {index} of group {group.group} came from unknown weights: {versions}"
                )
            elif length and max(versions) > group.trained_steps[0]:
                self._history.problems.append(
                    f"sample {index} of group {group.group} came from weights v{max(versions)}, newer than "
                    f"v{group.trained_steps[0]} that trained on it"
                )

    def _check_sample_counts(self) -> None:
        for step, ranks in self._history.trained.items():
            groups = {number for event in ranks.values() for number in event["groups"]}
            expected = [self._history.groups[number].num_trained_samples for number in groups]
            known = [count for count in expected if count is not None]
            for told in {event["step_samples"] for event in ranks.values() if "step_samples" in event}:
                if len(known) == len(expected) and told != sum(known):
                    self._history.problems.append(
                        f"step {step} trained {told} samples of groups that have {sum(known)} to train on"
                    )
