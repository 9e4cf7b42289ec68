"""Grader for multiple choice (`gpqa`): which letter a response settles on. Called by `grading.py`.

A letter counts only as a token of its own. In order: the box; the last explicit statement ("final answer: D", "I choose
D"); the last letter standing alone; the text of a choice. Naming two letters in one breath ("A or B") is no choice.
"""

import re
import string
import unicodedata
from collections.abc import Mapping
from numbers import Real
from typing import Any

from rlkit.rewards.extract import has_box, last_box
from rlkit.rewards.labels import label_texts

_TAIL_CHARS = 20_000
_MAX_CHOICES = 26

_DECORATION = re.compile(
    r"\\(?:text|textbf|textrm|mathrm|mathbf|mathit|boldsymbol)\s*\{([^{}]*)\}"
    r"|(?<!\w)['‘]([A-Z])['’](?!\w)|\*\*|__|`|\$"
)
_STATEMENT = re.compile(
    r"\b(?:(?:final|correct|right|best|my)\s+)?answer\b"
    r"|\b(?:final|correct|right|best|my)\s+(?:choice|option|pick|selection)\b"
    r"|\b(?P<weak>choice|option|pick|selection)\b"  # "option C is too small" tells less than "the answer is B"
    r"|\b(?:i\s+(?:would\s+)?|i'?ll\s+|we\s+|let'?s\s+)?(?:choose|chose|pick|picked|select|selected|go(?:ing)?\s+with|settle\s+on|opt\s+for)\b",
    re.IGNORECASE,
)
_CLAUSE_CHARS = 80
_CLAUSE_END = re.compile(r"[.!?](?:\s|$)|(?<=\S)\n")
_TOKEN = re.compile(r"(?<![\w\\'’])(?P<open>[(\[{]?)(?P<letter>[A-Za-z])(?P<close>[)\]}]?)(?![\w'’])")
_SUBJECT = re.compile(  # B is the correct answer
    _TOKEN.pattern + r"\s+(?:is|must\s+be)\s+(?:clearly\s+|indeed\s+|therefore\s+|thus\s+)?"
    r"(?:(?:the\s+|my\s+)?(?:(?:final|correct|right|best|only)\s+)?(?:answer|choice|option)\b|(?:the\s+)?correct\b)"
)
_NO_SUBJECT = re.compile(
    r"\b(?:or|and|if|whether|suppose|assume|assuming|is|why)\s+(?:that\s+)?(?:option\s+)?$", re.IGNORECASE
)
_REJECTED = re.compile(
    r"\s+(?:(?:is|are|was|were|must\s+be|can\s+be|seems|looks)\s+(?:\w+\s+)?"
    r"(?:not|wrong|incorrect|false|out|impossible|eliminated|excluded|invalid|implausible|tempting)\b"
    r"|(?:isn|aren|doesn|can|won)['’]t\b|fails?\b|cannot\b|does\s+not\b)"
)
_ARTICLE_FOLLOWED = re.compile(
    r"\s+(?!(?:is|was|because|since|as|and|or|but|seems|looks|though|although|over|rather|instead)\b)[a-z]"
)
_NEGATED = re.compile(
    r"(?:\bnot|\bcannot|n't|\bnever|\bneither|\bnor|\bthan|\brather than|\binstead of)\s+"
    r"(?:be\s+|option\s+|choice\s+|the\s+)?[(\[]?$",
    re.IGNORECASE,
)
_MORE_LETTERS = re.compile(r"(?:\s*(?:[,/&]|[,/&]?\s*(?:and|or)\b)\s*[(\[]?[A-Z][)\]]?)+\s*\.?\s*")
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
        box = last_box(response) or ""
        named = _letter_of_short_answer(box, texts)
        return float((_stated_letter(_undecorate(box), texts) if named is None else named) == correct)
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
    if isinstance(label, Real) and not isinstance(label, bool):
        letters: dict[Any, str] = dict(enumerate(texts or string.ascii_uppercase[:4]))
        return letters.get(label)  # 2.0 finds 2
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
    """Letter of the last statement that names exactly one; "" where it names several. Weak ones count if there is no
    other.
    """
    strong: str | None = None
    weak: str | None = None
    subjects = [match for match in _SUBJECT.finditer(text) if _is_subject(match, text, texts)]
    read_until = 0
    for match in sorted([*_STATEMENT.finditer(text), *subjects], key=lambda match: match.start()):
        if match.re is _SUBJECT:
            strong, read_until = match["letter"].upper(), match.end()
        elif match.start() >= read_until:
            stated = _letter_of_clause(text[match.end() : match.end() + _CLAUSE_CHARS], texts)
            if match["weak"]:
                weak = weak if stated is None else stated
            else:
                strong = strong if stated is None else stated
    return weak if strong is None else strong


def _letter_of_clause(clause: str, texts: Mapping[str, str]) -> str | None:
    """Letter that follows "the answer is"; "" where it is hedged, None where the clause names none."""
    end = _CLAUSE_END.search(clause)
    clause = clause[: end.start() + 1] if end else clause
    tokens = [match for match in _TOKEN.finditer(clause) if _is_choice_token(match, clause, texts, lower_case=True)]
    if not tokens:
        return _letter_of_text(re.sub(r"^(?:\s*(?:is|:|=))*\s*", "", clause), texts)
    first, rest = tokens[0], tokens[1:]
    hedge = _HEDGED.match(clause, first.end())
    if hedge and rest and rest[0].start() == hedge.end() and rest[0]["letter"].upper() != first["letter"].upper():
        settled = re.search(r"\bis\s+$", clause[: rest[-1].start()])  # "among A, B and C is B"
        return rest[-1]["letter"].upper() if settled else ""
    return first["letter"].upper()


def _is_subject(match: re.Match[str], text: str, texts: Mapping[str, str]) -> bool:
    before = text[max(0, match.start() - 24) : match.start()]
    return (
        match["letter"].isupper()
        and match["letter"] in texts
        and not (_NEGATED.search(before) or _NO_SUBJECT.search(before))
    )


def _is_choice_token(match: re.Match[str], text: str, texts: Mapping[str, str], *, lower_case: bool) -> bool:
    letter, after = match["letter"], text[match.end() : match.end() + 40]
    if letter.upper() not in texts:
        return False
    if _NEGATED.search(text[max(0, match.start() - 24) : match.start()]):
        return False
    if _REJECTED.match(after):
        return False
    if match["close"]:
        return True  # (C), C) or C]
    if letter.islower():
        # "answer: c" at the end of a clause is a choice; "a bit subtle" is an article, "c is the speed" a symbol
        return lower_case and re.match(r"\s*(?:[.,;:!?\n]|$)", after) is not None
    if letter == "A" and lower_case and re.search(r"(?:^|\w) $", text[: match.start()]):
        return True  # inside a sentence an article is small
    choice = texts[letter]
    if choice and after.lstrip().casefold().startswith(choice[:40].casefold()):
        return True
    return letter not in "AI" or _ARTICLE_FOLLOWED.match(after) is None


def _letter_of_short_answer(text: str, texts: Mapping[str, str]) -> str | None:
    """Letter of an answer that is little more than it: `C`, `(C)`, `C: the third one`, or the text of a choice."""
    text = _undecorate(text).strip()
    match = re.fullmatch(r"[(\[]?([A-Za-z])[)\]]?(?P<rest>\s*[.:),(-].*|\s*\n.*|\s*)", text, re.DOTALL)
    if match and match[1].upper() in texts and (len(text) <= 4 or match[1].isupper()):
        return None if _MORE_LETTERS.fullmatch(match["rest"]) else match[1].upper()
    named = _letter_of_text(text, texts)
    if named is not None:
        return named
    match = re.fullmatch(r"(?:option|choice|answer)\s*[:=]?\s*[(\[]?([A-Za-z])[)\]]?\.?", text, re.IGNORECASE)
    return match[1].upper() if match and match[1].upper() in texts else None


def _letter_of_text(text: str, texts: Mapping[str, str]) -> str | None:
    named = [letter for letter, choice in texts.items() if choice and _same_words(choice, text)]
    return named[0] if len(named) == 1 else None


def _undecorate(text: str) -> str:
    text = unicodedata.normalize("NFKC", text)  # Ａ and Ⓐ
    for _ in range(3):  # \\textbf{\\text{C}} is peeled from the inside
        text = _DECORATION.sub(lambda match: match[1] or match[2] or "", text)
    return text


def _same_words(left: str, right: str) -> bool:
    return " ".join(_undecorate(left).casefold().strip(" .").split()) == " ".join(
        _undecorate(right).casefold().strip(" .").split()
    )
