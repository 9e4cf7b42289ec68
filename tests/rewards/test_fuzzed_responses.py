"""Every built-in grader against a thousand fuzzed responses: a number from 0 to 1, no exception, in bounded time."""

import random
import string
import time

import pytest

from rlkit.config.reward_names import PLAIN_GRADERS
from rlkit.rewards.grading import AlgebraNeeded, UnscorableError, assess
from rlkit.rewards.watch import MarkerWatch

NUM_RESPONSES = 1000
ALL_S = 60.0
"""For a thousand responses on a busy machine; a quiet core needs a second or two."""
PIECES = [
    *(
        r"\boxed{",
        "}",
        "{",
        r"\frac",
        r"\frac{1}{2}",
        r"\sqrt{",
        "Answer:",
        "answer is ",
        "<think>",
        "</think>",
        "####",
    ),
    *("$", "$$", r"\text{", r"\left(", r"\right)", "^", "_", "\\", "%", ",", ".", "/", "=", "\n", "\x00", "\u2028"),
    *("(A)", "B.", "é", "🙂", "٣", "½", "1e999", "-", "0x10", "NaN", "inf", "x", "2", "73", "1,000", "\ud800"),
]
METADATA = {
    "instruction_id_list": ["punctuation:no_comma", "keywords:existence", "length_constraints:number_words"],
    "kwargs": [{}, {"keywords": ["x"]}, {"relation": "at least", "num_words": 3}],
    "choices": ["one", "two", "three"],
}


def fuzzed(rng: random.Random) -> str:
    kind = rng.randrange(4)
    if kind == 0:
        return "".join(rng.choice(string.printable) for _ in range(rng.randrange(200)))
    if kind == 1:
        return rng.choice(PIECES) * rng.randrange(400)
    text = "".join(rng.choice(PIECES) for _ in range(rng.randrange(60)))
    return text if kind == 2 else rf"so it is \boxed{{{text}}}"


@pytest.mark.parametrize("name", PLAIN_GRADERS)
def test_a_thousand_fuzzed_responses(name: str):
    rng = random.Random(f"fuzz {name}")
    watch = MarkerWatch()
    began = time.perf_counter()
    for number in range(NUM_RESPONSES):
        response, label = fuzzed(rng), rng.choice(["73", r"\frac{1}{2}", "B", fuzzed(rng), None, 3.5, ["1", "x"]])
        try:
            verdict = assess(name, response, label, METADATA, watch)
        except UnscorableError:
            continue
        is_number = isinstance(verdict, AlgebraNeeded) or 0.0 <= verdict <= 1.0
        assert is_number, f"response {number}: {response!r} and label {label!r} gave {verdict!r}"
    assert time.perf_counter() - began < ALL_S
