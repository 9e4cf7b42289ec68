"""Which writings are one answer: the table in tests/data/answers.txt, in both directions."""

import re
from pathlib import Path

import pytest

from rlkit.rewards import grade
from rlkit.rewards.equivalence import answers_equal

SECTION = re.compile(r"\[(.+)\]")
TABLE = Path(__file__).parents[1] / "data" / "answers.txt"


def pairs(*sections: str) -> list:
    found, section = [], ""
    for line in TABLE.read_text(encoding="utf-8").split("\n"):
        if not line or line.startswith("#"):
            continue
        if title := SECTION.fullmatch(line):
            section = title[1]
        elif section in sections:
            found.append(pytest.param(*line.rsplit(" | ", 1), id=line))
    assert found, sections
    return found


@pytest.mark.parametrize("left, right", pairs("same"))
def test_one_answer_in_two_writings_without_algebra(left, right):
    assert answers_equal(left, right) is True
    assert answers_equal(right, left) is True


@pytest.mark.parametrize("left, right", pairs("different"))
def test_near_misses_do_not_pass(left, right):
    for answer, label in ((left, right), (right, left)):
        assert grade("math", f"\\boxed{{{answer}}}", label) == 0.0


@pytest.mark.parametrize("left, right", pairs("same by algebra"))
def test_algebra_finds_equal_expressions(left, right):
    assert answers_equal(left, right) is None, "else this belongs into the other table"
    for answer, label in ((left, right), (right, left)):
        assert grade("math", f"\\boxed{{{answer}}}", label) == 1.0


@pytest.mark.parametrize("left, right", pairs("different by algebra"))
def test_algebra_tells_expressions_apart(left, right):
    for answer, label in ((left, right), (right, left)):
        assert grade("math", f"\\boxed{{{answer}}}", label) == 0.0


@pytest.mark.parametrize("left, right", pairs("same", "different", "same by algebra", "different by algebra"))
def test_every_answer_equals_itself(left, right):
    for text in (left, right):
        assert answers_equal(text, f" {text} ") is True
