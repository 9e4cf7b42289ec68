"""What a replay found: compared bit for bit, the earliest difference first. Called by `replay.py`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlkit.observability.replay_files import StepRecord
from rlkit.types.samples import SampleGroup

COMPARED = ("train/loss", "train/grad_norm")
"""Metrics that must be the same; with the tensors they stand for the whole step."""
MAX_NAMED = 5


@dataclass(kw_only=True, slots=True)
class Verdict:
    """Lists of sentences; nothing differs when all are empty."""

    changed_settings: list[str] = field(default_factory=list[str])
    changed_batches: list[str] = field(default_factory=list[str])
    changed_weights: list[str] = field(default_factory=list[str])
    """Of the weights that the replay began with."""
    differences: list[str] = field(default_factory=list[str])
    """Of what training made of them."""
    rollout: list[str] = field(default_factory=list[str])
    compared: list[str] = field(default_factory=list[str])
    """What was the same."""
    notes: list[str] = field(default_factory=list[str])

    @property
    def is_same(self) -> bool:
        lists = (self.changed_settings, self.changed_batches, self.changed_weights, self.differences, self.rollout)
        return not any(lists)

    def lines(self) -> list[str]:
        """For people: causes before effects."""
        told = []
        for title, sentences in (
            ("a changed flag", self.changed_settings),
            ("a changed batch", self.changed_batches),
            ("changed weights at the start", self.changed_weights),
            ("differs", self.differences),
            ("the rollout differs", self.rollout),
        ):
            told += [f"{title}: {sentence}" for sentence in sentences[:MAX_NAMED]]
            if len(sentences) > MAX_NAMED:
                told.append(f"{title}: and {len(sentences) - MAX_NAMED} more")
        told += [f"the same: {sentence}" for sentence in self.compared]
        told += [f"note: {sentence}" for sentence in self.notes]
        return [*told, "the same, bit for bit" if self.is_same else "NOT the same"]


def compare_training(
    verdict: Verdict,
    *,
    steps: Sequence[int],
    recorded_rows: Mapping[int, Mapping[str, Any]],
    rows: Mapping[int, Mapping[str, Any]],
    recorded: Mapping[int, StepRecord],
    found: Mapping[int, StepRecord],
) -> None:
    """Weights at the start, then loss, gradient norm and every tensor of each step, until the first step that
    differs."""
    first = recorded.get(steps[0], StepRecord()).before
    if first:
        verdict.changed_weights += _tensors(first, found[steps[0]].before)
    for step in steps:
        if step not in recorded_rows:
            verdict.notes.append(f"metrics.jsonl has no row of step {step}, so loss and gradient norm are not compared")
        else:
            verdict.differences += [
                f"step {step}: {name} was {recorded_rows[step][name]!r} and is {rows[step].get(name)!r}"
                for name in COMPARED
                if name in recorded_rows[step] and recorded_rows[step][name] != rows[step].get(name)
            ]
        after = recorded.get(step, StepRecord()).after
        if after:
            verdict.differences += [f"step {step}: {told}" for told in _tensors(after, found[step].after)]
        else:
            verdict.notes.append(f"no fingerprints of step {step} were recorded, so its weights are not compared")
        if verdict.differences:
            return
        what = "loss and gradient norm" if step in recorded_rows else "nothing of metrics"
        verdict.compared.append(f"step {step}: {what}" + (f" and {len(after)} tensors" if after else ""))


def compare_rollouts(verdict: Verdict, recorded: Sequence[SampleGroup], found: Sequence[SampleGroup]) -> None:
    """Token by token; the first difference of each sample is named."""
    samples = {(s.group_id, s.index): s for group in found for s in group.samples}
    count = 0
    for old in (sample for group in recorded for sample in group.samples):
        new = samples.get((old.group_id, old.index))
        who = f"group {old.group_id}, sample {old.index}"
        if new is None:
            verdict.rollout.append(f"{who} was not generated again")
        elif old.tokens != new.tokens:
            place = _first_difference(old.tokens, new.tokens)
            verdict.rollout.append(
                f"{who}: token {place - old.prompt_length} of the response was {_at(old.tokens, place)} and is "
                f"{_at(new.tokens, place)}"
            )
        count += 1
    if not verdict.rollout:
        verdict.compared.append(f"the tokens of all {count} samples, generated again with their seeds")


def _tensors(recorded: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """One sentence that names the first tensor that is not the same; none where all are."""
    different = [name for name, value in recorded.items() if found.get(name) != value]
    if not different:
        return []
    name = different[0]
    return [
        f"tensor {name} was {recorded[name]} and is {found.get(name, 'absent')} "
        f"({len(different)} of {len(recorded)} tensors differ)"
    ]


def _first_difference(first: Sequence[int], second: Sequence[int]) -> int:
    pairs: Iterable[tuple[int, int]] = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _at(tokens: Sequence[int], place: int) -> str:
    return str(tokens[place]) if place < len(tokens) else "the end"
