"""What each built-in grader looks at, and labels and responses of every type."""

import logging

import pytest

from rlkit.config.reward_names import REWARD_NAMES, RUN_GRADERS
from rlkit.rewards import RewardError, grade


@pytest.mark.parametrize(
    "response, label, reward",
    [
        (r"So \boxed{5} and then \boxed{6}.", "6", 1.0),
        (r"So \boxed{6} and then \boxed{5}.", "6", 0.0),
        (r"\fbox{6}", "6", 1.0),
        (r"\boxed 42", "42", 1.0),
        (r"$\boxed{\boxed{6}}$", "6", 1.0),
        (r"\\boxed{6}", "6", 1.0),
        (r"\boxed {6}", "6", 1.0),
        (r"\boxed{\{1,2\}}", r"\{2,1\}", 1.0),
        (r"\boxed{\left\{1,2\right.}", r"\{1,2\}", 0.0),
        ("6", "6", 0.0),
        ("The answer is 6.", "6", 0.0),
        (r"\boxed{6", "6", 0.0),
        (r"\boxed{5} ... \boxed{6", "5", 0.0),
        (r"as asked, in \boxed{}", "6", 0.0),
        (r"<think>\boxed{6}</think> no idea", "6", 0.0),
        (r"<think>hm</think>\boxed{6}", "6", 1.0),
        (r"\boxed{6}<think>or \boxed{7}", "6", 1.0),
        (r"reasoning \boxed{5}</think>\boxed{6}", "6", 1.0),
    ],
)
def test_math_reads_the_last_box_behind_the_thinking(response, label, reward):
    assert grade("math", response, label) == reward
    assert grade("boxed_math", response, label) == reward


@pytest.mark.parametrize(
    "label",
    [
        "72",
        " 72 ",
        "72.0",
        r"\boxed{72}",
        "48/2 = 24 <<48/2=24>>\n48+24 = 72\n#### 72",
        "#### 72\n",
        "The answer is 72.",
        "Answer: **72**",
        r"$\boxed{72}$",
        "$72",
        72,
        72.0,
        [71, 72],
        ("72",),
        b"72",
    ],
)
def test_the_answer_is_found_in_every_kind_of_label(label):
    assert grade("math", r"\boxed{72}", label) == 1.0
    assert grade("math", r"\boxed{7}", label) == 0.0


@pytest.mark.parametrize("label", ["", "   ", None, float("nan"), float("inf"), [], [None, ""], {"a": 5}, object()])
@pytest.mark.parametrize("name", ["math", "exact", "deepscaler", "dapo", "f1", "gpqa", "boxed_math", "boxed_exact"])
def test_a_missing_label_is_never_matched(name, label):
    for response in (
        "",
        "5",
        "nan",
        "None",
        r"</think>\boxed{}",
        r"</think>\boxed{nan}",
        "Answer: None",
        r"\boxed{None}",
    ):
        assert grade(name, response, label) == 0.0


@pytest.mark.parametrize(
    "label, answer",
    [
        (0, "0"),
        (0.0, "0"),
        (-0.0, "0"),
        (-3, "-3"),
        (2.5, "2.50"),
        (1e-7, r"10^{-7}"),
        (0.1 + 0.2, "0.3"),
        (True, "True"),
        (False, r"\text{false}"),
        (10**30, "1" + "0" * 30),
        (1e22, "10^{22}"),
    ],
)
def test_numbers_and_booleans_are_labels(label, answer):
    assert grade("math", f"\\boxed{{{answer}}}", label) == 1.0
    assert grade("math", r"\boxed{7}", label) == 0.0


def test_numpy_labels_are_numbers():
    numpy = pytest.importorskip("numpy")
    assert grade("math", r"\boxed{0}", numpy.int64(0)) == 1.0
    assert grade("math", r"\boxed{2.5}", numpy.float32(2.5)) == 1.0


@pytest.mark.parametrize(
    "response", [None, b"\xff\xfe", 5, 5.0, float("nan"), [], {}, object(), "\ud800", "\x00", "\\" * 999]
)
@pytest.mark.parametrize("name", [name for name in REWARD_NAMES if name not in RUN_GRADERS])
def test_odd_responses_score_a_number(name, response):
    metadata: dict[str, object] = {"choices": ["a", "b"], "instruction_id_list": ["punctuation:no_comma"]}
    assert 0.0 <= grade(name, response, "7", metadata) <= 1.0


@pytest.mark.parametrize(
    "response, label, reward",
    [
        ("42", "42", 1.0),
        (" 42\n", "42", 1.0),
        ("42.", "42", 0.0),
        ("042", "42", 0.0),
        ("42", 42, 1.0),
        ("42.0", 42.0, 1.0),
        ("42", 42.0, 1.0),
        ("100000000000000000000", 1e20, 1.0),
        ("100000000000000000001", 1e20, 0.0),
        ("100000000000000000000000", 1e23, 1.0),
        ("0.0000001", 1e-7, 1.0),
        ("1e-07", 1e-7, 1.0),
        ("true", True, 1.0),
        ("True", True, 1.0),
        ("a", ["b", "a"], 1.0),
        ("<think>x</think>42", "42", 1.0),
        ("A", "a", 0.0),
        (r"\boxed{42}", "42", 0.0),
        ("0", 0, 1.0),
        ("", "", 0.0),
    ],
)
def test_exact_compares_characters(response, label, reward):
    assert grade("exact", response, label) == reward


def test_boxed_exact_compares_the_content_of_the_box():
    assert grade("boxed_exact", r"It is \boxed{ 42 }.", "42") == 1.0
    assert grade("boxed_exact", r"It is \boxed{42.0}.", "42") == 0.0
    assert grade("boxed_exact", "42", "42") == 0.0


@pytest.mark.parametrize(
    "response, reward",
    [
        ("Answer: 7", 1.0),
        ("answer: 7.", 1.0),
        ("**Answer:** 7", 1.0),
        ("Answer: **7**", 1.0),
        ("Answer: 6\nAnswer: 7", 1.0),
        ("Answer: 6, no. Answer: 7", 1.0),
        ("Answer: 7\nAnswer: 6", 0.0),
        ("Answer:\n7", 1.0),
        ("Answer: $\\frac{14}{2}$", 1.0),
        ("Answer: \\boxed{7}", 1.0),
        ("7", 0.0),
        ("The answer is 7", 0.0),
        ("Answer:", 0.0),
        ("<think>Answer: 7", 0.0),
        ("Answer: 7\n\nThis is because of the above.", 1.0),
        ("\\boxed{7}", 0.0),
        ("Answer：7", 1.0),
        ("Answer: 7 8", 0.0),
    ],
)
def test_dapo_reads_the_last_answer_line(response, reward):
    assert grade("dapo", response, 7) == reward


def test_dapo_labels_may_be_fractions_and_decimals():
    assert grade("dapo", "Answer: 3.5", "3.5") == 1.0
    assert grade("dapo", "Answer: 3", "3.5") == 0.0
    assert grade("dapo", "Answer: 0.5", r"\frac{1}{2}") == 1.0
    assert grade("boxed_dapo", r"Answer: 3. \boxed{3.5}", "3.5") == 1.0


def test_deepscaler_takes_a_response_heading_for_finished_thinking():
    assert grade("deepscaler", r"\boxed{1} ###Response \boxed{2}", "2") == 1.0
    assert grade("deepscaler", r"\boxed{2} ###Response none", "2") == 0.0


@pytest.mark.parametrize(
    "prediction, label, reward",
    [
        ("The cat sat.", "cat sat", 1.0),
        ("cat", "dog", 0.0),
        ("a b c d", "b d", 0.8),
        ("no", "no", 1.0),
        ("No.", "no", 1.0),
        ("oslo", ["Bergen", "Oslo"], 1.0),
        ("<think>Bergen</think>Oslo", "Oslo", 1.0),
        (42, 42, 1.0),
        ("the", "the", 1.0),
        ("the", "a", 0.0),
        ("the", "THE", 1.0),
        ("a.", "A", 1.0),
        ("option A", "A", 2 / 3),
        ("cafe\u0301", "caf\u00e9", 1.0),
    ],
)
def test_f1_counts_words(prediction, label, reward):
    assert grade("f1", prediction, label) == pytest.approx(reward)


CHOICES: dict[str, object] = {"choices": ["w", "x", "y", "z"]}


@pytest.mark.parametrize(
    "response, letter",
    [
        ("The answer is (B).", "B"),
        ("b", "B"),
        ("Answer: b", "B"),
        ("**Answer: C**", "C"),
        ("The answer is not A but B.", "B"),
        ("The correct option is D because A is wrong.", "D"),
        ("A closer look shows that C fits best.", "C"),
        ("I choose a hard path, then C.", "C"),
        ("The answer is A or B.", None),
        ("I eliminate A, B and D, leaving C.", "C"),
        ("It can't be A. It must be D.", "D"),
        ("I am an AI", None),
        (r"Final: $\boxed{B}$", "B"),
        (r"\boxed{x}", "B"),
        (r"\boxed{B", None),
        (r"\boxed{A, B}", None),
        (r"\boxed{\textbf{(D)}\ 5}", "D"),
        ("The answer is z", "D"),
        ("Vitamin C is the key, so B.", "B"),
        ("answer is B, wait, actually the answer is D.", "D"),
        ("Answer: E", None),
        ("Answer: A/B", None),
        ("<think>A</think> B", "B"),
        ("<think>Answer: B", None),
        ("We select C over D.", "C"),
        ("The answer is a.", "A"),
        ("The answer is C\n\nExplanation: A and B are wrong.", "C"),
        ("The answer is B. Option A is wrong because it is too small.", "B"),
        ("Answer: B\n\nOption A: too small.\nOption C: too large.", "B"),
        ("Option A is wrong. Option B is wrong. So option C.", "C"),
        ("B is the answer. A is a distractor.", "B"),
        ("B is correct; A, C and D are not.", "B"),
        ("If B is correct then x > 0, which fails. The answer is D.", "D"),
        ("The answer cannot be A; it must be B.", "B"),
        ("The answer is A given the data.", "A"),
        ("The answer is 'B'.", "B"),
        ("The answer is: x", "B"),
        ("The right answer among A, B, C and D is D.", "D"),
        ("D\n\nBecause C is a strange choice.", "D"),
        ("Answer: \uff24", "D"),
        (r"\boxed{A, B, C}", None),
        (r"\boxed{\text{A or B}}", None),
        (r"\boxed{\text{The answer is D}}", "D"),
        (r"\boxed{D\text{ (z)}}", "D"),
        ("", None),
    ],
)
def test_a_choice_is_the_letter_the_response_settles_on(response, letter):
    scores = {each: grade("gpqa", response, each, CHOICES) for each in "ABCD"}
    assert scores == {each: float(each == letter) for each in "ABCD"}


@pytest.mark.parametrize(
    "label, metadata",
    [
        ("C", {}),
        ("(c)", CHOICES),
        (2, CHOICES),
        (2.0, CHOICES),
        ("y", CHOICES),
        ("Y.", CHOICES),
        ("C", {"choices": {"A": "w", "B": "x", "C": "y"}}),
        ("anything", {**CHOICES, "correct_letter": "C"}),
        (2, {}),
        ("F", {"valid_letters": "DEFG", "choices": list("wxyz")}),
    ],
)
def test_a_choice_may_be_labelled_by_letter_index_or_text(label, metadata):
    letter = "F" if "valid_letters" in metadata else "C"
    assert grade("gpqa", f"Answer: {letter}", label, metadata) == 1.0
    assert grade("gpqa", "Answer: B", label, metadata) == 0.0


def test_boxed_gpqa_wants_the_box():
    assert grade("boxed_gpqa", r"\boxed{C}", "C", CHOICES) == 1.0
    assert grade("boxed_gpqa", "Answer: C", "C", CHOICES) == 0.0


def test_random_is_a_fair_coin_that_always_falls_alike():
    rewards = [grade("random", f"response {n}", n) for n in range(400)]
    assert rewards == [grade("random", f"response {n}", n) for n in range(400)]
    assert set(rewards) == {0.0, 1.0} and 150 < sum(rewards) < 250


def test_a_row_may_name_its_own_grader():
    assert grade("math", "42", "42", {"rm_type": "exact"}) == 1.0
    assert grade("exact", r"\boxed{42}", "42", {"rm_type": "boxed_exact"}) == 1.0
    assert grade("exact", "42", "42", {"rm_type": None}) == 1.0


@pytest.mark.parametrize(
    "name, metadata, message",
    [
        ("maths", None, r"unknown rm_type 'maths'; did you mean 'math'\?"),
        ("boxed_mth", None, "did you mean 'boxed_math'"),
        ("math", {"rm_type": "exakt"}, r"unknown metadata rm_type 'exakt'; did you mean 'exact'"),
        ("", None, "no grader"),
        (None, None, "no grader"),
        ("remote_rm", None, "remote_rm waits for a server .* only the graders of a run have it"),
        ("math", {"rm_type": "code"}, "rm_type code waits for a server or a process"),
        ("math", {"rm_type": 5}, "unknown metadata rm_type 5"),
    ],
)
def test_an_unknown_grader_names_the_nearest(name, metadata, message):
    with pytest.raises(RewardError, match=message):
        grade(name, r"\boxed{1}", "1", metadata)


@pytest.mark.parametrize(
    "name, response, marker",
    [
        ("math", "29", "boxed"),
        ("boxed_exact", "29", "boxed"),
        ("dapo", "29", "Answer"),
        ("deepscaler", "</think>29", "boxed"),
    ],
)
def test_a_marker_that_never_comes_is_reported_at_growing_intervals(caplog, name, response, marker):
    with caplog.at_level(logging.WARNING):
        grade(name, r"</think>Answer: \boxed{29}", "29")  # whatever came before, the row starts here
        for count in range(100):
            grade(name, response, "29")
            assert len(caplog.records) == (count >= 7) + (count >= 63)
        assert f"rm_type {name}:" in caplog.text and marker in caplog.text
