"""Histories of small runs, written event by event: which are proven, and what is said about the others."""

import re
from pathlib import Path
from typing import Any

import pytest

from rlkit.observability.audit import AuditReport, audit, disagreements
from rlkit.observability.ledger import Ledger, LedgerEvent, LedgerRecord, read_ledger

GROUPS = 2
"""Groups a step."""
ROWS = 5
"""Of the prompt file, in its order."""


class Run:
    """Writes a ledger as a run would: two groups of two samples a step."""

    def __init__(self) -> None:
        self.records: list[LedgerRecord] = []
        self.next_group = 0
        self.drawn = 0
        """Rows since the beginning, over all epochs."""

    def write(self, event: LedgerEvent, **fields: Any) -> None:
        self.records.append(LedgerRecord(event=event, time=0.0, fields=fields))

    def place(self, drawn: int) -> list[int]:
        return [drawn // ROWS, drawn % ROWS]

    def state(self) -> dict[str, Any]:
        epoch, row = self.place(self.drawn)
        return {"prompts": {"epoch": epoch, "drawn": row}, "next_group_id": self.next_group, "waiting": []}

    def start(self, step: int = 0) -> None:
        self.write(LedgerEvent.STARTED, step=step, source="engines", rollout_state={})
        self.next_group = self.drawn = 0

    def resume(self, step: int, **changes: Any) -> None:
        """From the checkpoint after `step - 1` of a run that has trained every step once."""
        self.next_group = self.drawn = GROUPS * step
        state = {**self.state(), **changes}
        self.write(LedgerEvent.RESUMED, step=step, checkpoint_step=step - 1, source="engines", rollout_state=state)

    def issue(self, step: int) -> list[int]:
        begin, self.drawn = self.drawn, self.drawn + GROUPS
        groups = list(range(self.next_group, self.next_group + GROUPS))
        self.next_group += GROUPS
        self.write(
            LedgerEvent.DRAWN, step=step, first_group=groups[0], num_groups=GROUPS, begin=self.place(begin),
            end=self.place(self.drawn), too_long=0, num_rows=ROWS,
        )  # fmt: skip
        for offset, group in enumerate(groups):
            epoch, position = self.place(begin + offset)
            self.write(
                LedgerEvent.ISSUED, step=step, group=group, position=position, epoch=epoch, num_samples=2,
                seeds=[group, group + 100],
            )  # fmt: skip
        return groups

    def respond(self, step: int, groups: list[int], *, version: int | None = None) -> None:
        for group in groups:
            versions = [[step if version is None else version]] * 2
            self.write(
                LedgerEvent.GENERATED, step=step, group=group, status=["completed"] * 2, lengths=[3, 4],
                versions=versions,
            )  # fmt: skip
            self.write(LedgerEvent.GRADED, step=step, group=group, rewards=[0.0, 1.0])

    def train(self, step: int, groups: list[int], *, samples: int | None = None) -> None:
        for group in groups:
            self.write(LedgerEvent.KEPT, step=step, group=group)
        count = 2 * len(groups) if samples is None else samples
        self.write(LedgerEvent.TRAINED, step=step, rank=0, groups=groups, step_samples=count)
        self.write(LedgerEvent.TRAINED, step=step, rank=1, groups=groups, step_samples=count)

    def step(self, step: int, *, save: bool = False) -> None:
        groups = self.issue(step)
        self.respond(step, groups)
        self.train(step, groups)
        if save:
            self.write(LedgerEvent.SAVED, step=step, rollout_state=self.state())

    def audit(self) -> AuditReport:
        return audit(self.records)


def three_steps() -> Run:
    run = Run()
    run.start()
    for step in range(3):
        run.step(step, save=True)
    return run


def test_an_uninterrupted_run_over_an_epoch_boundary_is_proven():
    run = three_steps()
    run.write(LedgerEvent.FINISHED, step=3)
    report = run.audit()
    assert report.problems == [] and report.notes == []
    assert (report.num_steps, report.num_groups, report.num_trained) == (3, 6, 6)
    assert report.is_finished


def test_steps_after_the_checkpoint_are_trained_again_and_named():
    """Killed in step 4 with a checkpoint of step 2: steps 3 and the half of 4 are taken back."""
    run = three_steps()
    run.step(3)
    run.respond(4, run.issue(4)[:1])
    run.write(LedgerEvent.RESTARTED, attempt=1, max_restarts=2, exit_status=75)
    run.resume(3)
    for step in (3, 4):
        run.step(step)
    report = run.audit()
    assert report.problems == []
    assert [(item.step, item.groups, item.resumed_at) for item in report.retrained] == [(3, (6, 7), 3)]
    assert (report.attempts, report.restarts, report.num_steps, report.num_trained) == (2, 1, 5, 10)


def test_a_start_from_nothing_takes_everything_back():
    run = Run()
    run.start()
    run.step(0)
    run.start()
    run.step(0)
    report = run.audit()
    assert report.problems == [] and [item.step for item in report.retrained] == [0]


def test_groups_that_waited_are_trained_later():
    run = Run()
    run.start()
    first = run.issue(0)
    run.respond(0, first[:1])
    run.write(LedgerEvent.BUFFERED, step=0, group=first[1], reason="continue")
    run.train(0, first[:1])
    assert run.audit().problems == [] and run.audit().num_waiting == 1
    run.write(LedgerEvent.SAVED, step=0)
    state = {**run.state(), "waiting": [{"group": {"group_id": first[1]}}]}
    assert disagreements(run.records, step=0, rollout_state=state) == []
    assert (
        "group 1, which had been issued but neither" in disagreements(run.records, step=0, rollout_state=run.state())[0]
    )
    second = run.issue(1)
    run.respond(1, [first[1], *second])
    run.train(1, [first[1], *second])
    assert run.audit().problems == [] and run.audit().num_waiting == 0


def skipped_group(run: Run) -> None:
    run.next_group += 1
    run.step(3)


def skipped_rows(run: Run) -> None:
    run.drawn += 1
    run.step(3)


def trained_twice(run: Run) -> None:
    run.step(3)
    run.train(4, [6])


def step_without_training(run: Run) -> None:
    run.respond(3, run.issue(3))
    run.step(4)


def kept_and_lost(run: Run) -> None:
    groups = run.issue(3)
    run.respond(3, groups)
    run.train(3, groups[:1])
    run.write(LedgerEvent.KEPT, step=3, group=groups[1])


def without_an_outcome(run: Run) -> None:
    groups = run.issue(3)
    run.respond(3, groups)
    run.train(3, groups[:1])


def rank_twice(run: Run) -> None:
    run.write(LedgerEvent.TRAINED, step=2, rank=1, groups=[4, 5], step_samples=4)


def lost_samples(run: Run) -> None:
    groups = run.issue(3)
    run.respond(3, groups)
    run.train(3, groups, samples=3)


def never_generated(run: Run) -> None:
    run.train(3, run.issue(3))


def newer_weights(run: Run) -> None:
    groups = run.issue(3)
    run.respond(3, groups, version=5)
    run.train(3, groups)


def unknown_weights(run: Run) -> None:
    groups = run.issue(3)
    run.respond(3, groups, version=-1)
    run.train(3, groups)


def same_row_again(run: Run) -> None:
    run.drawn -= 1
    run.records[:] = [record for record in run.records if record.event is not LedgerEvent.DRAWN]
    run.step(3)


def draws_removed(run: Run) -> None:
    run.records[:] = [record for record in run.records if record.event is not LedgerEvent.DRAWN]


def last_steps_cut_out(run: Run) -> None:
    run.write(LedgerEvent.FINISHED, step=5)


def saved_without_training(run: Run) -> None:
    run.write(LedgerEvent.SAVED, step=3, rollout_state=run.state())


def group_twice_in_a_step(run: Run) -> None:
    groups = run.issue(3)
    run.respond(3, groups)
    run.train(3, [*groups, groups[-1]])


def other_prompt_after_the_resume(run: Run) -> None:
    run.step(3)
    run.resume(3)
    run.drawn += 1
    run.step(3)


@pytest.mark.parametrize(
    "damage, said",
    [
        (skipped_group, "group 6 never issued"),
        (skipped_rows, "step 3 draws from epoch 1, row 2, but the draw before it ended at epoch 1, row 1"),
        (trained_twice, r"group 6 was trained in steps \[3, 4\]"),
        (step_without_training, "step 3 never trained"),
        (kept_and_lost, "group 7 was kept in step 3 and never trained"),
        (without_an_outcome, "group 7 was issued in step 3 and neither kept nor dropped"),
        (rank_twice, "rank 1 trained twice in step 2"),
        (lost_samples, "step 3 trained 3 samples of groups that have 4"),
        (never_generated, "group 6 was trained without having been generated"),
        (newer_weights, "weights v5, newer than v3"),
        (unknown_weights, "unknown weights"),
        (same_row_again, r"row 0 of epoch 1 was issued as groups \[5, 6\]"),
        (draws_removed, "6 groups were issued, but only 0 were drawn"),
        (last_steps_cut_out, "finished before step 5, but the last step that the ledger knows of is 2"),
        (saved_without_training, "step 3 was saved, but the ledger does not know its training"),
        (group_twice_in_a_step, "rank 0 trained on a group twice within step 3"),
        (other_prompt_after_the_resume, "group 6 was row 1 of epoch 1 before the resume and is row 2"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_what_is_wrong_is_found_and_named(damage, said):
    run = three_steps()
    assert run.audit().is_proven
    run = three_steps()
    damage(run)
    report = run.audit()
    assert not report.is_proven
    assert any(re.search(said, problem) for problem in report.problems), report.problems


@pytest.mark.parametrize(
    "changes, said",
    [
        ({}, None),
        ({"next_group_id": 9}, "3 groups would be skipped"),
        ({"next_group_id": 4}, "2 groups .4, 5. had been trained by then and would be trained twice"),
        ({"prompts": {"epoch": 0, "drawn": 0}}, "stands at epoch 0, row 0 .* it has to be epoch 1, row 1"),
    ],
    ids=["fits", "skips", "repeats", "other place"],
)
def test_a_checkpoint_that_contradicts_the_ledger(changes, said):
    run = three_steps()
    found = disagreements(run.records, step=2, rollout_state={**run.state(), **changes})
    if said is None:
        assert found == []
    else:
        assert any(re.search(said, item) for item in found), found


def test_a_checkpoint_of_work_that_was_taken_back():
    """Rewound to step 0 and killed: the checkpoint of step 2 is still on the disk, with the highest number."""
    run = three_steps()
    late_state = run.state()
    run.resume(1)
    run.step(1)
    assert run.audit().problems == []
    found = disagreements(run.records, step=2, rollout_state=late_state)
    assert any("belongs to work that was taken back when the run resumed at step 1" in item for item in found)


def test_a_torn_last_line_is_reported_and_does_not_matter(tmp_path: Path):
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as ledger:
        for record in three_steps().records:
            ledger.write(record.event, **record.fields)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"event":"issued","time":3,"gro')
    torn: list[int] = []
    report = audit(read_ledger(path, torn=torn), torn_lines=torn)
    assert report.torn_lines == [whole.count(b"\n") + 1] and report.is_proven


def test_an_empty_ledger_proves_nothing():
    assert not audit([]).is_proven
