"""The sums of the quick start and the pupil who forgets to carry."""

import json
import random

import pytest
from tiny_task import NUM_HELD_OUT, Problem, split_problems, write_prompts


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_split_is_disjoint_and_large_enough(seed):
    train, held_out = split_problems(seed)
    questions = {problem.question for problem in train}, {problem.question for problem in held_out}
    assert len(questions[0]) == len(train) >= 4000
    assert len(questions[1]) == len(held_out) == NUM_HELD_OUT >= 256
    assert not questions[0] & questions[1]


def test_carries_have_the_same_share_in_both_parts():
    train, held_out = split_problems(3)
    shares = [sum(problem.has_carry for problem in part) / len(part) for part in (train, held_out)]
    assert shares[0] == pytest.approx(shares[1], abs=0.002) == pytest.approx(43 / 64, abs=0.002)


def test_split_depends_on_the_seed_alone():
    assert split_problems(5) == split_problems(5)
    assert split_problems(5) != split_problems(6)


@pytest.mark.parametrize(
    ("left", "right", "careless"),
    [(37, 58, "85"), (99, 99, "188"), (12, 12, "24"), (62, 97, "159"), (65, 97, "152")],
    ids=["carry", "carry into hundreds", "no carry", "only tens overflow", "both"],
)
def test_a_careless_pupil_loses_the_carry_and_nothing_else(left, right, careless):
    problem = Problem(left=left, right=right)
    assert problem.homework(random.Random(0), forgets=1.0) == careless
    assert problem.homework(random.Random(0), forgets=0.0) == problem.answer == str(left + right)


def test_the_pupil_forgets_as_often_as_asked():
    rng, problem = random.Random(1), Problem(left=37, right=58)
    share = sum(problem.homework(rng, forgets=0.6) == "85" for _ in range(4000)) / 4000
    assert share == pytest.approx(0.6, abs=0.03)


def test_prompt_file_has_the_right_answers(tmp_path):
    _, held_out = split_problems(0)
    write_prompts(tmp_path / "data" / "heldout.jsonl", held_out)
    rows = [json.loads(line) for line in (tmp_path / "data" / "heldout.jsonl").read_text().splitlines()]
    assert len(rows) == len(held_out)
    for row in rows:
        (message,) = row["prompt"]
        assert message["role"] == "user"
        assert sum(int(number) for number in message["content"].split("+")) == int(row["label"])
