"""What each built-in grader looks at, in this process and in bounded time. Called by `grade` and by `GraderPool`.

`assess` answers at once where text and exact arithmetic decide. Where only computer algebra can tell it returns the
pairs to compare, and the caller hands them to a process that may be killed.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from rlkit.config.reward_names import BOXED_PREFIX, REWARD_NAMES, RUN_GRADERS
from rlkit.rewards.choices import grade_choice
from rlkit.rewards.equivalence import answers_equal
from rlkit.rewards.extract import after_thinking, answer_line, has_box, has_closed_thinking, label_answer, last_box
from rlkit.rewards.instructions import UnknownInstructionError, follows_all
from rlkit.rewards.labels import label_texts, response_text
from rlkit.rewards.texts import grade_exact, grade_f1, grade_random
from rlkit.rewards.watch import MarkerWatch
from rlkit.types.errors import RewardError

_RESPONSE_HEADING = "###Response"


class UnscorableError(RewardError):
    """One row cannot be graded, whatever the response is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AlgebraNeeded:
    """The reward is 1.0 if algebra finds any of these pairs equal, else 0.0."""

    pairs: tuple[tuple[str, str], ...]
    """(answer, label)"""


def resolve_rm_type(rm_type: str | None, metadata: Mapping[str, object]) -> str:
    """The grader of one sample: `metadata["rm_type"]` if the row names one, else the run's. RewardError if it is none
    or unknown.
    """
    chosen = metadata.get("rm_type") or rm_type
    if chosen in REWARD_NAMES:
        return str(chosen)
    if not chosen:
        raise RewardError("no grader: set --rm-type or --custom-rm-path, or give rows a metadata key rm_type")
    nearest = difflib.get_close_matches(str(chosen), REWARD_NAMES, n=1, cutoff=0.0)
    where = "metadata rm_type" if metadata.get("rm_type") else "rm_type"
    raise RewardError(
        f"unknown {where} {chosen!r}; did you mean {nearest[0]!r}? Built in are: {', '.join(REWARD_NAMES)}"
    )


def assess(
    rm_type: str | None, response: object, label: object, metadata: Mapping[str, object], watch: MarkerWatch
) -> float | AlgebraNeeded:
    """Reward of a response, or the comparisons that are left for algebra."""
    rm_type = resolve_rm_type(rm_type, metadata)
    in_box = rm_type.startswith(BOXED_PREFIX)
    name = rm_type.removeprefix(BOXED_PREFIX)
    if name in RUN_GRADERS:
        raise RewardError(f"rm_type {name} waits for a server or a process; only the graders of a run have it")
    full_text = response_text(response)
    text = after_thinking(full_text)
    if name == "random":
        return grade_random(full_text, label)
    if name == "ifbench":
        try:
            return float(follows_all(text, metadata))
        except UnknownInstructionError as error:
            raise UnscorableError(str(error)) from error
    if name == "gpqa":
        return grade_choice(text, label, metadata, box_only=in_box)
    if name == "deepscaler" and not _finished_thinking(rm_type, full_text, watch):
        return 0.0
    if name == "deepscaler" and not has_closed_thinking(full_text):
        text = text.partition(_RESPONSE_HEADING)[2]
    if name in ("math", "deepscaler") or in_box:
        watch.note(rm_type, "\\boxed{}", found=has_box(text))
        answer = last_box(text)
    elif name == "dapo":
        answer = answer_line(text)
        watch.note(rm_type, "a line 'Answer: ...'", found=answer is not None)
    else:
        answer = text
    if not answer:
        return 0.0
    if name == "exact":
        return grade_exact(answer, label)
    if name == "f1":
        return grade_f1(answer, label)
    return _compare(last_box(answer) or answer, label)


def _finished_thinking(rm_type: str, text: str, watch: MarkerWatch) -> bool:
    finished = has_closed_thinking(text) or _RESPONSE_HEADING in text
    watch.note(rm_type, "</think>", found=finished)
    return finished


def _compare(answer: str, label: object) -> float | AlgebraNeeded:
    undecided: list[tuple[str, str]] = []
    for text in label_texts(label):
        expected = label_answer(text)
        verdict = answers_equal(answer, expected)
        if verdict:
            return 1.0
        if verdict is None:
            undecided.append((answer, expected))
    return AlgebraNeeded(pairs=tuple(undecided)) if undecided else 0.0
