"""The effective history of a run, rebuilt from its ledger: what its weights and its place in the data stand for.

A start or resume takes back what its checkpoint does not hold: steps after it are trained again, and groups that it had
not yet issued are issued again. Called by `audit.py`, which judges the result.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from rlkit.observability.ledger import LedgerEvent, LedgerRecord

MAX_NAMED = 8
"""Ids that a message lists before it only counts."""


@dataclass(kw_only=True, slots=True)
class GroupHistory:
    """The effective events of one group."""

    group: int
    issued: dict[str, Any] | None = None
    generated: dict[str, Any] | None = None
    is_graded: bool = False
    kept_step: int | None = None
    dropped: dict[str, int | None] = field(default_factory=dict)
    """Reason -> number of samples, None for all of them."""
    dropped_step: int | None = None
    buffered_step: int | None = None
    trained_steps: list[int] = field(default_factory=list)

    @property
    def issued_step(self) -> int | None:
        return None if self.issued is None else self.issued["step"]

    @property
    def num_trained_samples(self) -> int | None:
        """What is left to train on after the drops."""
        if self.issued is None:
            return None
        num_samples = self.issued["num_samples"] if self.generated is None else len(self.generated["status"])
        counts = self.dropped.values()
        return None if None in counts else num_samples - sum(n for n in counts if n is not None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Retrained:
    """A step that was trained, then taken back by a resume that starts at or before it."""

    step: int
    groups: tuple[int, ...]
    resumed_at: int
    """First step of the attempt that took it back."""


class History:
    """The effective history so far."""

    def __init__(self) -> None:
        self.attempts = 0
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.restarts = 0
        self.source: str | None = None
        self.is_finished = False
        self.first_group = 0
        self.first_step = 0
        self.groups: dict[int, GroupHistory] = {}
        self._draws: list[dict[str, Any]] = []
        self.trained: dict[int, dict[int, dict[str, Any]]] = {}
        """step -> rank -> event."""
        self._saves: set[int] = set()
        self._lost_saves: dict[int, int] = {}
        """Step of a checkpoint whose timeline was left -> first step of the attempt that left it."""
        self.retrained: list[Retrained] = []
        self._taken_back: dict[int, dict[str, Any]] = {}
        """Group id -> its issue, where it is to be issued again."""

    def add(self, record: LedgerRecord) -> None:
        fields = record.fields
        match record.event:
            case LedgerEvent.STARTED | LedgerEvent.RESUMED:
                self.begin(fields)
            case LedgerEvent.DRAWN:
                self._add_draw(fields)
            case LedgerEvent.ISSUED:
                self._add_issue(fields)
            case LedgerEvent.GENERATED:
                self._group(fields).generated = fields
            case LedgerEvent.GRADED:
                self._group(fields).is_graded = True
            case LedgerEvent.KEPT:
                self._group(fields).kept_step = fields["step"]
            case LedgerEvent.DROPPED:
                group = self._group(fields)
                group.dropped[fields["reason"]] = len(fields["indices"]) if "indices" in fields else None
                group.dropped_step = fields["step"]
            case LedgerEvent.BUFFERED:
                self._group(fields).buffered_step = fields["step"]
            case LedgerEvent.TRAINED:
                self._add_training(fields)
            case LedgerEvent.SAVED:
                if self.trained and fields["step"] not in self.trained:
                    self.problems.append(f"step {fields['step']} was saved, but the ledger does not know its training")
                self._saves.add(fields["step"])
                self._lost_saves.pop(fields["step"], None)
            case LedgerEvent.FINISHED:
                self.is_finished = True
                if self.trained and max(self.trained) != fields["step"] - 1:
                    self.problems.append(
                        f"the run finished before step {fields['step']}, but the last step that the ledger knows of is "
                        f"{max(self.trained)}"
                    )
            case LedgerEvent.FAILED:
                self.notes.append(f"an attempt failed: {fields['error']}: {fields['message'].splitlines()[0]}")
            case LedgerEvent.STOPPED:
                self.notes.append(f"stopped by signal {fields['signal']} before step {fields['step']}")
            case LedgerEvent.RESTARTED:
                self.restarts += 1

    @property
    def num_drawn(self) -> int:
        """Groups of the effective draws."""
        return sum(draw["num_groups"] for draw in self._draws)

    # ---- starts and resumes ----------------------------------------------------------------------------------------

    def begin(self, fields: Mapping[str, Any]) -> None:
        """A new attempt: take back what its checkpoint does not hold, and compare what is left with its state."""
        state = fields.get("rollout_state") or {}
        next_group: int = state.get("next_group_id", 0)
        checkpoint_step: int = fields.get("checkpoint_step", fields["step"] - 1 if state else -1)
        self.attempts += 1
        self.is_finished = False
        self.source = fields.get("source", self.source)
        if self.attempts == 1:
            self.first_group, self.first_step = next_group, fields["step"]
            return
        self._check_timeline(checkpoint_step)
        held = {item["group"]["group_id"] for item in state.get("waiting", ())}
        self._take_back(checkpoint_step, next_group, held, resumed_at=fields["step"])
        self._check_state(checkpoint_step, next_group, state)

    def _check_timeline(self, step: int) -> None:
        if step in self._saves or step < 0:
            return
        if step in self._lost_saves:
            self.problems.append(
                f"the checkpoint of step {step} belongs to work that was taken back when the run resumed at step "
                f"{self._lost_saves[step]}: it is not part of this run's history any more"
            )
        else:
            self.notes.append(f"the ledger does not know the save of step {step} that an attempt continued from")

    def _take_back(self, step: int, next_group: int, held: Set[int], *, resumed_at: int) -> None:
        """`held`: groups that the checkpoint holds as waiting, whatever became of them in the steps that it knows."""
        for trained_step in [number for number in self.trained if number > step]:
            ranks = self.trained.pop(trained_step)
            groups = sorted({group for event in ranks.values() for group in event["groups"]})
            self.retrained.append(Retrained(step=trained_step, groups=tuple(groups), resumed_at=resumed_at))
        for save in [number for number in self._saves if number > step]:
            self._saves.discard(save)
            self._lost_saves[save] = resumed_at
        self._draws = [draw for draw in self._draws if draw["first_group"] < next_group]
        for number in list(self.groups):
            group = self.groups[number]
            group.trained_steps = [trained for trained in group.trained_steps if trained <= step]
            if number >= next_group and not group.trained_steps:
                if group.issued is not None:
                    self._taken_back[number] = group.issued
                del self.groups[number]
                continue
            for name in ("kept_step", "dropped_step", "buffered_step"):
                value = getattr(group, name)
                is_open_again = number in held and name != "buffered_step" and not group.trained_steps
                if value is not None and (value > step or is_open_again):
                    setattr(group, name, None)
                    if name == "dropped_step":
                        group.dropped.clear()

    def _check_state(self, step: int, next_group: int, state: Mapping[str, Any]) -> None:
        again = sorted(number for number in self.groups if number >= next_group)
        if again:
            self.problems.append(
                f"the state of step {step} issues group {next_group} next, but {named('group', again)} had been "
                "trained by then and would be trained twice"
            )
        issued = [number for number in self.groups if number < next_group]
        if self.groups and issued and max(issued) + 1 < next_group:
            self.problems.append(
                f"the state of step {step} issues group {next_group} next, but the ledger knows groups up to "
                f"{max(issued)} only: {next_group - max(issued) - 1} groups would be skipped"
            )
        held = {item["group"]["group_id"] for item in state.get("waiting", ())}
        open_groups = [
            number
            for number, group in self.groups.items()
            if number < next_group and group.issued is not None and not is_settled(group) and number not in held
        ]
        if open_groups:
            self.problems.append(
                f"the state of step {step} issues group {next_group} next and holds nothing of "
                f"{named('group', open_groups)}, which had been issued but neither trained nor dropped: their prompts "
                "would be skipped"
            )
        prompts = state.get("prompts")
        if self._draws and prompts is not None:
            there, here = self._draws[-1]["end"], [prompts["epoch"], prompts["drawn"]]
            if there != here:
                self.problems.append(
                    f"the state of step {step} stands at epoch {here[0]}, row {here[1]} of the prompt file; by the "
                    f"ledger it has to be epoch {there[0]}, row {there[1]}"
                )

    # ---- events of groups ------------------------------------------------------------------------------------------

    def _group(self, fields: Mapping[str, Any]) -> GroupHistory:
        number: int = fields["group"]
        return self.groups.setdefault(number, GroupHistory(group=number))

    def _add_draw(self, fields: dict[str, Any]) -> None:
        if self._draws and self._draws[-1]["end"] != fields["begin"]:
            self.problems.append(
                f"step {fields['step']} draws from epoch {fields['begin'][0]}, row {fields['begin'][1]}, but the draw "
                f"before it ended at epoch {self._draws[-1]['end'][0]}, row {self._draws[-1]['end'][1]}"
            )
        (epoch, row), (end_epoch, end_row) = fields["begin"], fields["end"]
        count = (end_epoch - epoch) * fields["num_rows"] + end_row - row
        if count != fields["num_groups"] + fields["too_long"]:
            self.problems.append(
                f"step {fields['step']} went {count} rows forward for {fields['num_groups']} groups and "
                f"{fields['too_long']} rows that are too long"
            )
        self._draws.append(fields)

    def _add_issue(self, fields: dict[str, Any]) -> None:
        number = fields["group"]
        group = self._group(fields)
        if group.issued is not None:
            self.problems.append(
                f"group {number} was issued in step {group.issued['step']} and again in step {fields['step']}"
            )
        before = self._taken_back.pop(number, None)
        if before is not None:
            if (before["epoch"], before["position"]) != (fields["epoch"], fields["position"]):
                self.problems.append(
                    f"group {number} was row {before['position']} of epoch {before['epoch']} before the resume and is "
                    f"row {fields['position']} of epoch {fields['epoch']} after it"
                )
            elif before["seeds"] != fields["seeds"]:
                self.notes.append(f"group {number} was issued again with other seeds")
        group.issued = fields

    def _add_training(self, fields: dict[str, Any]) -> None:
        step, rank = fields["step"], fields["rank"]
        ranks = self.trained.setdefault(step, {})
        if rank in ranks:
            self.problems.append(f"rank {rank} trained twice in step {step}")
        ranks[rank] = fields
        if len(set(fields["groups"])) < len(fields["groups"]):
            self.problems.append(f"rank {rank} trained on a group twice within step {step}")
        for number in fields["groups"]:
            group = self.groups.setdefault(number, GroupHistory(group=number))
            if step not in group.trained_steps:
                group.trained_steps.append(step)


def is_settled(group: GroupHistory) -> bool:
    """Trained, or dropped with all its samples."""
    return bool(group.trained_steps) or (group.kept_step is None and group.dropped_step is not None)


def named(what: str, numbers: Sequence[int]) -> str:
    """`group 3`, or `12 groups (3, 5, ...)`."""
    if len(numbers) == 1:
        return f"{what} {numbers[0]}"
    shown = ", ".join(map(str, numbers[:MAX_NAMED]))
    return f"{len(numbers)} {what}s ({shown}{', ...' if len(numbers) > MAX_NAMED else ''})"
