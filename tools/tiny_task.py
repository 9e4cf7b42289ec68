"""The task of the tiny model: sums of two numbers, and the careless pupil whose homework it has learnt from.

Every operand has two digits and ends in 2 to 9, so two sums in three carry from the units to the tens. The pupil
forgets that carry most of the time (37+58=85) and makes no other mistake. A model that imitates it therefore answers
greedily what it sees most: sums without a carry are right, nearly all others are 10 too small; yet at temperature 1 the
right answer is often among its samples, which is all that GRPO needs. Called by `make_tiny_model.py`.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

NUM_HELD_OUT = 512
OPERANDS = [number for number in range(12, 100) if number % 10 >= 2]
Message = dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    left: int
    right: int

    @property
    def has_carry(self) -> bool:
        """From the units to the tens."""
        return self.left % 10 + self.right % 10 >= 10

    @property
    def question(self) -> str:
        return f"{self.left}+{self.right}"

    @property
    def answer(self) -> str:
        return str(self.left + self.right)

    def homework(self, rng: random.Random, *, forgets: float) -> str:
        """The pupil's answer; `forgets` is the share of carries that it leaves out."""
        is_careless = self.has_carry and rng.random() < forgets
        return str(self.left + self.right - 10) if is_careless else self.answer

    def messages(self) -> list[Message]:
        return [{"role": "user", "content": self.question}]


def split_problems(seed: int) -> tuple[list[Problem], list[Problem]]:
    """(training, held-out): all 5,184 ordered pairs, shuffled and cut. Carries have the same share in both."""
    rng = random.Random(f"tiny task {seed}")
    train: list[Problem] = []
    held_out: list[Problem] = []
    everything = [Problem(left=left, right=right) for left in OPERANDS for right in OPERANDS]
    for has_carry in (False, True):
        kind = [problem for problem in everything if problem.has_carry is has_carry]
        rng.shuffle(kind)
        num_held_out = round(NUM_HELD_OUT * len(kind) / len(everything))
        held_out += kind[:num_held_out]
        train += kind[num_held_out:]
    rng.shuffle(train)
    rng.shuffle(held_out)
    return train, held_out


def write_prompts(path: Path, problems: Sequence[Problem]) -> None:
    """JSONL with the columns `prompt` (chat messages) and `label` (the right answer, whatever the pupil wrote)."""
    rows = [json.dumps({"prompt": problem.messages(), "label": problem.answer}) for problem in problems]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
