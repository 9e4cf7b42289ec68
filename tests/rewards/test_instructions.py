"""Verifiable instructions: each check with a response that follows it and one that does not."""

from typing import Any

import pytest

from rlkit.rewards import RewardError, grade
from rlkit.rewards.instructions import CHECKS

CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "keywords:existence": ({"keywords": ["Cat", "dog"]}, ["A cat, a DOG."], ["A cat.", "category dog"]),
    "keywords:frequency": (
        {"keyword": "so", "frequency": 2, "relation": "less than"},
        ["So what, also soon"],
        ["so so"],
    ),
    "keywords:forbidden_words": ({"forbidden_words": ["bad"]}, ["badly"], ["Bad!"]),
    "keywords:letter_frequency": (
        {"letter": "e", "let_frequency": 3, "let_relation": "at least"},
        ["Eerie"],
        ["eel"],
    ),
    "length_constraints:number_sentences": (
        {"num_sentences": 3, "relation": "less than"},
        ["One. Two!", "It costs 3.50 dollars. Yes."],
        ["One. Two? Three"],
    ),
    "length_constraints:number_words": ({"num_words": 3, "relation": "at least"}, ["don't do it"], ["well-known fact"]),
    "length_constraints:number_paragraphs": (
        {"num_paragraphs": 2},
        ["one\n***\ntwo", "one\n***\ntwo\n***\n"],
        ["one", "a\n***\n***\nb"],
    ),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "weekend"},
        ['one\n\n"Weekend," he said'],
        ["weekend\n\none", "one\n\nweekend\n\nthree"],
    ),
    "detectable_content:number_placeholders": ({"num_placeholders": 2}, ["[name] at [place]"], ["[name]"]),
    "detectable_content:postscript": ({"postscript_marker": "P.P.S"}, ["Hi\nP.P.S. bye"], ["Hi\nP.S. bye"]),
    "detectable_format:number_bullet_lists": (
        {"num_bullets": 2},
        ["* a\n* b", "- a\ntext\n- b"],
        ["* a", "**bold** x\n* a", "* a\n* b\n* c"],
    ),
    "detectable_format:constrained_response": ({}, ["My answer is maybe."], ["maybe"]),
    "detectable_format:number_highlighted_sections": ({"num_highlights": 2}, ["*a* and **b**"], ["*a* and b", "** **"]),
    "detectable_format:multiple_sections": (
        {"section_spliter": "SECTION", "num_sections": 2},
        ["SECTION 1\na\nSECTION 2\nb"],
        ["SECTION 1\na"],
    ),
    "detectable_format:json_format": ({}, ['{"a": 1}', "```json\n[1]\n```"], ["a: 1", '{"a": 1} so']),
    "detectable_format:title": ({}, ["<<Joy>>\ntext"], ["<<>>", "Joy"]),
    "combination:two_responses": ({}, ["a ****** b"], ["a ****** a", "a"]),
    "combination:repeat_prompt": ({"prompt_to_repeat": "Say it."}, ["say it. Yes"], ["Yes. Say it."]),
    "startend:end_checker": ({"end_phrase": "The end."}, ['so. the end."'], ["The end. Or not"]),
    "startend:quotation": ({}, ['"so"'], ['"so', '"']),
    "change_case:capital_word_frequency": (
        {"capital_frequency": 2, "capital_relation": "at least"},
        ["GO AND see"],
        ["GO and see"],
    ),
    "change_case:english_capital": ({}, ["ALL 3."], ["All"]),
    "change_case:english_lowercase": ({}, ["all 3."], ["All"]),
    "punctuation:no_comma": ({}, ["a; b"], ["a, b"]),
}


def follows(response: str, *instructions: tuple[str, dict[str, Any]]) -> float:
    metadata: dict[str, object] = {
        "instruction_id_list": [name for name, _ in instructions],
        "kwargs": [given for _, given in instructions],
    }
    return grade("ifbench", response, None, metadata)


def test_every_check_has_cases():
    assert CASES.keys() == CHECKS.keys()


@pytest.mark.parametrize("name", CASES)
def test_check(name: str):
    given, good, bad = CASES[name]
    for response in good:
        assert follows(response, (name, given)) == 1.0, response
    for response in bad:
        assert follows(response, (name, given)) == 0.0, response


def test_all_instructions_must_be_followed_and_thinking_does_not_count():
    both = (("punctuation:no_comma", {}), ("change_case:english_lowercase", {}))
    assert follows("so it is", *both) == 1.0 and follows("So it is", *both) == 0.0
    assert follows("<think>A, B</think>so it is", *both) == 1.0
    assert follows("  ", ("punctuation:no_comma", {})) == 0.0, "no response follows nothing"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "instruction_id_list"),
        ({"instruction_id_list": ["language:response_language"]}, "no check for .*'language:response_language'"),
        ({"instruction_id_list": ["keywords:existence"], "kwargs": [{}]}, "argument is missing.*keywords"),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": []}, None),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}, {}]}, "list of 1 objects"),
    ],
)
def test_rows_that_cannot_be_checked_are_named(metadata: dict[str, object], message: str | None):
    if message is None:
        assert grade("ifbench", "a", None, metadata) == 1.0
        return
    with pytest.raises(RewardError, match=message):
        grade("ifbench", "a", None, metadata)
