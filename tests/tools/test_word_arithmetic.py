"""Arithmetic in words, and the partial-credit reward of the SmolLM2 recipes."""

import json
import subprocess
import sys

import make_arithmetic_data as data
import partial_credit
import pytest


@pytest.mark.parametrize(
    ("number", "words"), [(0, "zero"), (13, "thirteen"), (20, "twenty"), (21, "twenty-one"), (99, "ninety-nine")]
)
def test_numbers_in_words(number, words):
    assert data.in_words(number) == words


def test_every_number_has_its_own_word():
    assert len({data.in_words(number) for number in range(100)}) == 100


def test_files_are_disjoint_right_and_the_same_for_the_same_seed(tmp_path):
    def make(name: str) -> list[list[dict]]:
        command = [sys.executable, data.__file__, "--output", str(tmp_path / name), "--num-heldout", "50"]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        files = [tmp_path / name / "train.jsonl", tmp_path / name / "heldout.jsonl"]
        return [[json.loads(line) for line in path.read_text().splitlines()] for path in files]

    train, held_out = make("a")
    assert make("b") == [train, held_out]
    questions = [{row["prompt"][-1]["content"] for row in rows} for rows in (train, held_out)]
    assert len(held_out) == 50 and len(train) > 500 and not questions[0] & questions[1]
    value = {data.in_words(number): number for number in range(100)}
    for row in [*train, *held_out]:
        left, name, right = row["prompt"][-1]["content"].removeprefix("What is ").removesuffix("?").split(" ")
        assert data.OPERATIONS[name](value[left], value[right]) == int(row["label"])


@pytest.mark.parametrize("count", ["0", "1000000"])
def test_impossible_split_is_refused(tmp_path, count):
    command = [sys.executable, data.__file__, "--output", str(tmp_path), "--num-heldout", count]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and f"--num-heldout {count} must lie" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("response", "label", "score", "correct"),
    [
        ("Natalia sold 72 clips.", "72", 1.0, 1.0),
        ("First 48, then 24: in all 1,072", "1072", 1.0, 1.0),
        ("It is 72.0", 72, 1.0, 1.0),
        ("72 or 36", "72", 0.25, 0.0),
        ("1,234,567.5", "1234567.5", 1.0, 1.0),
        ("2,9", "29", 0.1 + 0.3 * 9 / 29, 0.0),
        ("15,60", "1560", 0.1 + 0.3 * 60 / 1560, 0.0),
        ("1,0723", "10723", 0.1 + 0.3 * 723 / 10723, 0.0),
        ("-72", "72", 0.1, 0.0),
        ("I do not know.", "72", 0.0, 0.0),
        ("", "72", 0.0, 0.0),
        ("0", "72", 0.1, 0.0),
        ("0", "0", 1.0, 1.0),
        ("5", "0", 0.1, 0.0),
    ],
)
def test_partial_credit(response, label, score, correct):
    result = partial_credit.score(response, label, {})
    assert result["score"] == pytest.approx(score) and result["correct"] == correct


def test_nearer_is_better_and_never_as_good_as_right():
    scores = [partial_credit.score(f"It is {number}", "100", {})["score"] for number in (100, 101, 120, 200, 10**9)]
    assert scores == sorted(scores, reverse=True) and scores[1] < 0.5


def test_a_label_without_a_number_is_an_error():
    with pytest.raises(ValueError, match="'unknown' holds no number"):
        partial_credit.score("72", "unknown", {})


@pytest.mark.parametrize("response", ["9" * 400, "1" + "," * 5000, "-" * 10000 + "5", "1." * 20000])
def test_odd_responses_get_a_finite_score(response):
    assert 0.0 <= partial_credit.score(response, "72", {})["score"] <= 1.0
