"""Grader for verifiable instructions (`ifbench`): does a response do what each instruction of its row demands?

Rows are in the format of IFEval (Zhou et al. 2023, arXiv:2311.07911): `metadata["instruction_id_list"]` names the
checks, `metadata["kwargs"]` has their arguments, one object each. The checks of IFEval that need no model or download
are built in. Called by `grading.py`.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[str, Mapping[str, Any]], bool]

_WORD = re.compile(r"\w+(?:['’-]\w+)*")
_SENTENCE_END = re.compile(r"[.!?]+(?=\s|$)")
_BULLET = re.compile(r"^\s*(?:\*(?!\*)|-)\s*\S", re.MULTILINE)
_HIGHLIGHT = re.compile(r"\*\*[^\n*]+\*\*|\*[^\n*]+\*")
_PLACEHOLDER = re.compile(r"\[[^\[\]\n]+\]")
_TITLE = re.compile(r"<<[^\n<>]+>>")
_DIVIDER = re.compile(r"\s?\*\*\*\s?")
_ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_FENCE = re.compile(r"^```(?:json)?\s*|\s*```$", re.IGNORECASE)


class UnknownInstructionError(ValueError):
    """There is no check for an instruction; the message names it."""


def follows_all(response: str, metadata: Mapping[str, Any]) -> bool:
    """Whether the response follows every instruction of the row. UnknownInstructionError for what cannot be checked."""
    names = metadata.get("instruction_id_list")
    if not isinstance(names, list) or not names:
        raise UnknownInstructionError("the row has no metadata instruction_id_list, a list of instruction names")
    arguments = metadata.get("kwargs") or [{}] * len(names)
    if not isinstance(arguments, list) or len(arguments) != len(names):
        raise UnknownInstructionError(f"metadata kwargs must be a list of {len(names)} objects, one an instruction")
    unknown = [name for name in names if name not in CHECKS]
    if unknown:
        raise UnknownInstructionError(
            f"no check for instruction {unknown[0]!r}; built in are {', '.join(sorted(CHECKS))}. Leave such rows out, "
            "or check them with --custom-rm-path"
        )
    if not response.strip():
        return False
    try:
        return all(CHECKS[name](response, given or {}) for name, given in zip(names, arguments, strict=True))
    except (KeyError, TypeError) as error:
        told = f"an argument is missing or of the wrong type in metadata kwargs: {error}"
        raise UnknownInstructionError(told) from error


def _compare(count: int, wanted: int, relation: str | None) -> bool:
    """`relation` is `at least` or `less than`, as IFEval writes it."""
    if relation in (None, "at least"):
        return count >= wanted
    if relation == "less than":
        return count < wanted
    raise TypeError(f"relation {relation!r}")


def _count_word(text: str, word: str) -> int:
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))


def _num_words(text: str) -> int:
    return len(_WORD.findall(text))


def _num_sentences(text: str) -> int:
    """Runs of text that end in . ! or ?, and what is left behind the last of them."""
    return sum(bool(part.strip()) for part in _SENTENCE_END.split(text))


def _keywords_exist(text: str, given: Mapping[str, Any]) -> bool:
    return all(_count_word(text, word) for word in given["keywords"])


def _keyword_frequency(text: str, given: Mapping[str, Any]) -> bool:
    return _compare(_count_word(text, given["keyword"]), given["frequency"], given.get("relation"))


def _no_forbidden_words(text: str, given: Mapping[str, Any]) -> bool:
    return not any(_count_word(text, word) for word in given["forbidden_words"])


def _letter_frequency(text: str, given: Mapping[str, Any]) -> bool:
    count = text.lower().count(given["letter"].lower())
    return _compare(count, given["let_frequency"], given.get("let_relation"))


def _number_of_sentences(text: str, given: Mapping[str, Any]) -> bool:
    return _compare(_num_sentences(text), given["num_sentences"], given.get("relation"))


def _number_of_words(text: str, given: Mapping[str, Any]) -> bool:
    return _compare(_num_words(text), given["num_words"], given.get("relation"))


def _number_of_paragraphs(text: str, given: Mapping[str, Any]) -> bool:
    """Paragraphs between dividers `***`; an empty one may only stand at either end."""
    parts = _DIVIDER.split(text)
    inner = parts[1:-1]
    return all(part.strip() for part in inner) and sum(bool(part.strip()) for part in parts) == given["num_paragraphs"]


def _first_word_of_paragraph(text: str, given: Mapping[str, Any]) -> bool:
    """Paragraphs between blank lines; the nth one (from 1) begins with a word."""
    paragraphs = [part for part in re.split(r"\n\n+", text) if part.strip()]
    nth = given["nth_paragraph"]
    if len(paragraphs) != given["num_paragraphs"] or not 1 <= nth <= len(paragraphs):
        return False
    words = paragraphs[nth - 1].split()
    return words[0].strip("\"'“‘.,!?").lower() == given["first_word"].lower()


def _placeholders(text: str, given: Mapping[str, Any]) -> bool:
    return len(_PLACEHOLDER.findall(text)) >= given["num_placeholders"]


def _postscript(text: str, given: Mapping[str, Any]) -> bool:
    marker = re.sub(r"[\s.]", "", given["postscript_marker"])
    spelled = r"\.?\s*".join(map(re.escape, marker))
    return re.search(rf"(?:^|\n)\s*{spelled}\.?\s*:?.*\S", text, re.IGNORECASE) is not None


def _bullet_lists(text: str, given: Mapping[str, Any]) -> bool:
    return len(_BULLET.findall(text)) == given["num_bullets"]


def _constrained_response(text: str, given: Mapping[str, Any]) -> bool:
    return any(answer in text for answer in _ANSWERS)


def _highlighted_sections(text: str, given: Mapping[str, Any]) -> bool:
    return sum(bool(part.strip("* ")) for part in _HIGHLIGHT.findall(text)) >= given["num_highlights"]


def _sections(text: str, given: Mapping[str, Any]) -> bool:
    marker = rf"\s?{re.escape(given['section_spliter'])}\s?\d+\s?"
    return len(re.split(marker, text)) - 1 >= given["num_sections"]


def _json(text: str, given: Mapping[str, Any]) -> bool:
    try:
        json.loads(_FENCE.sub("", text.strip()))
    except ValueError:
        return False
    return True


def _title(text: str, given: Mapping[str, Any]) -> bool:
    return any(title.strip("<> ") for title in _TITLE.findall(text))


def _two_responses(text: str, given: Mapping[str, Any]) -> bool:
    """Two different answers with six asterisks between them."""
    parts = [part.strip() for part in text.split("******") if part.strip()]
    return len(parts) == 2 and parts[0] != parts[1]


def _repeats_prompt(text: str, given: Mapping[str, Any]) -> bool:
    return text.strip().lower().startswith(given["prompt_to_repeat"].strip().lower())


def _end(text: str, given: Mapping[str, Any]) -> bool:
    return text.strip().strip('"').lower().endswith(given["end_phrase"].strip().lower())


def _quotation(text: str, given: Mapping[str, Any]) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def _capital_word_frequency(text: str, given: Mapping[str, Any]) -> bool:
    count = sum(word.isupper() for word in _WORD.findall(text))
    return _compare(count, given["capital_frequency"], given.get("capital_relation"))


def _capital(text: str, given: Mapping[str, Any]) -> bool:
    return text.isupper()


def _lowercase(text: str, given: Mapping[str, Any]) -> bool:
    return text.islower()


def _no_comma(text: str, given: Mapping[str, Any]) -> bool:
    return "," not in text


CHECKS: Mapping[str, Check] = {
    "keywords:existence": _keywords_exist,
    "keywords:frequency": _keyword_frequency,
    "keywords:forbidden_words": _no_forbidden_words,
    "keywords:letter_frequency": _letter_frequency,
    "length_constraints:number_sentences": _number_of_sentences,
    "length_constraints:number_words": _number_of_words,
    "length_constraints:number_paragraphs": _number_of_paragraphs,
    "length_constraints:nth_paragraph_first_word": _first_word_of_paragraph,
    "detectable_content:number_placeholders": _placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _bullet_lists,
    "detectable_format:constrained_response": _constrained_response,
    "detectable_format:number_highlighted_sections": _highlighted_sections,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _json,
    "detectable_format:title": _title,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": _repeats_prompt,
    "startend:end_checker": _end,
    "startend:quotation": _quotation,
    "change_case:capital_word_frequency": _capital_word_frequency,
    "change_case:english_capital": _capital,
    "change_case:english_lowercase": _lowercase,
    "punctuation:no_comma": _no_comma,
}
"""Instruction -> its check. `language:response_language` is left out: telling languages apart needs a model."""
