"""Grader for multiple choice (`gpqa`): which letter a response settles on. Called by `grading.py`.

A letter counts only as a token of its own. In order: the box; the last explicit statement ("final answer: D", "I choose
D"); the last letter standing alone; the text of a choice. Naming two letters in one breath ("A or B") is no choice.
"""

import re
import string
from collections.abc import Mapping

from rlkit.rewards.extract import has_box, last_box
from rlkit.rewards.labels import label_texts

_TAIL_CHARS = 20_000
_MAX_CHOICES = 26

_DECORATION = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mathit|boldsymbol)\s*\{([^{}]*)\}|\*\*|__|`|\$")
_STATEMENT = re.compile(
    r"\b(?:(?:final|correct|right|best|my)\s+)?(?:answer|choice|option|pick|selection)\b"
    r"|\b(?:i\s+(?:would\s+)?|i'?ll\s+|we\s+|let'?s\s+)?(?:choose|chose|pick|picked|select|selected|go(?:ing)?\s+with|settle\s+on|opt\s+for)\b",
    re.IGNORECASE,
)
_CLAUSE_CHARS = 80
_CLAUSE_END = re.compile(r"[.!?\n](?:\s|$)")
_TOKEN = re.compile(r"(?<![\w\\'’])(?P<open>[(\[{]?)(?P<letter>[A-Za-z])(?P<close>[)\]}]?)(?![\w'’])")
_ARTICLE_FOLLOWED = re.compile(
    r"\s+(?!(?:is|was|because|since|as|and|or|but|seems|looks|though|although|over|rather|instead)\b)[a-z]"
)
_NEGATED = re.compile(
    r"(?:\bnot|n't|\bnever|\bneither|\bthan|\brather than|\binstead of)\s+(?:be\s+|option\s+|choice\s+|the\s+)?[(\[]?$",
    re.IGNORECASE,
)
_SECOND_LETTER = re.compile(r"\s*[,/&]\s*[(\[]?[A-Z][)\]]?\s*")
_HEDGED = re.compile(r"\s*(?:,|/|&|\bor\b|\band\b|\bor maybe\b)\s*", re.IGNORECASE)


def grade_choice(response: str, label: object, metadata: Mapping[str, object], *, box_only: bool) -> float:
    """1.0 where the response settles on the labelled choice.

    Label: a letter, a 0-based index, or the text of a choice. `metadata` may hold `choices` (a list, or a dict from
    letters), `valid_letters` and `correct_letter`; without choices the letters A to D are valid, or up to the label's
    letter.
    """
    texts = _choice_texts(metadata)
    correct = _correct_letter(label, texts, metadata)
    if correct is None:
        return 0.0
    if not texts:
        last = max(correct, "D")
        texts = dict.fromkeys(string.ascii_uppercase[: string.ascii_uppercase.index(last) + 1], "")
    if has_box(response):
        box = last_box(response)
        return float(box is not None and _letter_of_short_answer(box, texts) == correct)
    return 0.0 if box_only else float(chosen_letter(response, texts) == correct)


def chosen_letter(response: str, texts: Mapping[str, str]) -> str | None:
    """The letter that an unboxed response settles on; `texts` maps the valid letters to their choices."""
    text = _undecorate(response[-_TAIL_CHARS:])
    stated = _stated_letter(text, texts)
    if stated is not None:
        return stated
    short = _letter_of_short_answer(text, texts)
    if short is not None:
        return short
    alone = [match for match in _TOKEN.finditer(text) if _is_choice_token(match, text, texts, lower_case=False)]
    return alone[-1]["letter"] if alone else None


def _choice_texts(metadata: Mapping[str, object]) -> dict[str, str]:
    choices = metadata.get("choices")
    if isinstance(choices, Mapping):
        return {str(key).strip().upper(): str(value).strip() for key, value in choices.items()}
    letters = metadata.get("valid_letters")
    if not isinstance(letters, list | tuple | str):
        letters = string.ascii_uppercase
    letters = [str(letter).strip().upper() for letter in letters][:_MAX_CHOICES]
    if isinstance(choices, list | tuple):
        return {letter: str(choice).strip() for letter, choice in zip(letters, choices, strict=False)}
    return dict.fromkeys(letters, "") if "valid_letters" in metadata else {}


def _correct_letter(label: object, texts: Mapping[str, str], metadata: Mapping[str, object]) -> str | None:
    explicit = metadata.get("correct_letter")
    if isinstance(explicit, str) and _is_letter(explicit.strip().upper()):
        return explicit.strip().upper()
    if isinstance(label, int) and not isinstance(label, bool):
        letters = list(texts) or list(string.ascii_uppercase[:4])
        return letters[label] if 0 <= label < len(letters) else None
    for text in label_texts(label):
        stripped = _undecorate(text).strip(" ()[].:").upper()
        if _is_letter(stripped) and (not texts or stripped in texts):
            return stripped
        by_text = _letter_of_text(text, texts)
        if by_text is not None:
            return by_text
    return None


def _is_letter(text: str) -> bool:
    return len(text) == 1 and text in string.ascii_uppercase


def _stated_letter(text: str, texts: Mapping[str, str]) -> str | None:
    """Letter of the last statement that names exactly one."""
    stated: str | None = None
    for trigger in _STATEMENT.finditer(text):
        clause = text[trigger.end() : trigger.end() + _CLAUSE_CHARS]
        end = _CLAUSE_END.search(clause, 2)
        clause = clause[: end.start() + 1] if end else clause
        tokens = [match for match in _TOKEN.finditer(clause) if _is_choice_token(match, clause, texts, lower_case=True)]
        if not tokens:
            named = _letter_of_text(re.sub(r"^\s*(?:is|:|=)\s*", "", clause), texts)
            stated = named or stated
            continue
        first = tokens[0]
        hedge = _HEDGED.match(clause, first.end())
        if (
            hedge
            and len(tokens) > 1
            and tokens[1].start() == hedge.end()
            and tokens[1]["letter"].upper() != first["letter"].upper()
        ):
            stated = ""
        else:
            stated = first["letter"].upper()
    return stated


def _is_choice_token(match: re.Match[str], text: str, texts: Mapping[str, str], *, lower_case: bool) -> bool:
    letter, after = match["letter"], text[match.end() : match.end() + 24]
    if letter.upper() not in texts:
        return False
    if _NEGATED.search(text[max(0, match.start() - 24) : match.start()]):
        return False
    if match["close"]:
        return True  # (C), C) or C]
    if letter.islower():
        # "answer: c" at the end of a clause is a choice; "a bit subtle" is an article, "c is the speed" a symbol
        return lower_case and re.match(r"\s*(?:[.,;:!?\n]|$)", after) is not None
    return letter not in "AI" or _ARTICLE_FOLLOWED.match(after) is None


def _letter_of_short_answer(text: str, texts: Mapping[str, str]) -> str | None:
    """Letter of an answer that is little more than it: `C`, `(C)`, `C: the third one`, or the text of a choice."""
    text = _undecorate(text).strip()
    match = re.fullmatch(r"[(\[]?([A-Za-z])[)\]]?(?P<rest>\s*[.:),-].*|\s*)", text, re.DOTALL)
    if match and match[1].upper() in texts and (len(text) <= 4 or match[1].isupper()):
        return None if _SECOND_LETTER.fullmatch(match["rest"]) else match[1].upper()
    named = _letter_of_text(text, texts)
    if named is not None:
        return named
    match = re.fullmatch(r"(?:option|choice|answer)\s*[:=]?\s*[(\[]?([A-Za-z])[)\]]?\.?", text, re.IGNORECASE)
    return match[1].upper() if match and match[1].upper() in texts else None


def _letter_of_text(text: str, texts: Mapping[str, str]) -> str | None:
    named = [letter for letter, choice in texts.items() if choice and _same_words(choice, text)]
    return named[0] if len(named) == 1 else None


def _undecorate(text: str) -> str:
    for _ in range(3):  # \\textbf{\\text{C}} is peeled from the inside
        text = _DECORATION.sub(lambda match: match[1] or "", text)
    return text


def _same_words(left: str, right: str) -> bool:
    return " ".join(_undecorate(left).casefold().strip(" .").split()) == " ".join(
        _undecorate(right).casefold().strip(" .").split()
    )
