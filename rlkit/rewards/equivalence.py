"""Whether two written answers are the same answer. Called by the graders and, with symbolic algebra added, by the
algebra process.

Structure comes first: assignments, lists, tuples, sets, intervals and unions are taken apart, so that order and
multiplicity are judged here and algebra only ever sees single expressions. Verdicts are three-valued: None means "only
algebra can tell".
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from rlkit.rewards.exact_numbers import is_too_large
from rlkit.rewards.normalize import bracket_depths, compact, normalize, split_top, trim
from rlkit.rewards.quantities import Quantity, parse_quantity, quantities_equal, split_unit

MAX_ALGEBRA_CHARS = 1000
_MAX_ITEMS = 40
_MAX_NESTING = 30

Verdict = bool | None
Algebra = Callable[[str, str], Verdict]
"""Compares two expressions without collections in them: (answer, label) -> same or not."""

_COMMA = re.compile(
    r",|;|\\&|\\text\{\s*(?:,|,?\s*and|,?\s*or)\s*\}|\b(?:and|or)\b|(?<=[\d)}]) ?\\(?:lor|vee)(?![A-Za-z])"
)
_SPACED_COMMA = re.compile(r"[,;] |;|\\text\{\s*(?:and|or)\s*\}|\b(?:and|or)\b")
_CUP = re.compile(r"\\cup(?![A-Za-z])")
_OR = re.compile(r"\\text\{\s*or\s*\}|\bor\b|\\lor(?![A-Za-z])")
_EQUALS = re.compile(r"(?<![<>!:=])=(?!=)")
_RELATION = re.compile(r"[<>]|\\(?:le|ge|lt|gt|ne|approx|equiv|sim|cong)(?![A-Za-z])")
_MEMBER = re.compile(r"^[A-Za-z]\s*\\in(?![A-Za-z])\s*")
_ASSIGNED = re.compile(
    r"(?:\\[A-Za-z]+\s*|[A-Za-z])(?:_\{?\w+\}?)?'*(?:\s*\(\s*[A-Za-z](?:\s*,\s*[A-Za-z])*\s*\))?"  # x, f'(x)
    r"|\\text\{[^{}]*\}(?:_\{?\w+\}?)?|[A-Za-z][A-Za-z ]{3,40}"  # words
    r"|\(\s*[A-Za-z](?:\s*,\s*[A-Za-z])+\s*\)"  # (x, y)
)
_PLUS_MINUS = re.compile(r"\\(?:pm|mp)(?![A-Za-z])")
_BASE = re.compile(r"([0-9A-Fa-f]+)_\{?(\d+)\}?")
_SPACED_DIGITS = re.compile(r"(?<![_^\d])\d+ \d")
_TEXT = re.compile(r"\\text\{")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{4,}")
_CLOCK = re.compile(r"\d ?[ap]\.? ?m\b", re.IGNORECASE)
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\{\w+\*?\}")
_FUNCTIONS = frozenset(("sinh", "cosh", "tanh", "sqrt", "asin", "acos", "atan", "arcsin", "arccos", "arctan"))


def never(answer: str, label: str) -> Verdict:
    """The algebra of a process that has none."""
    return None


def answers_equal(answer: str, label: str, algebra: Algebra = never) -> Verdict:
    """Whether `answer` and `label` are two writings of one answer; None when `algebra` was needed and cannot tell."""
    if max(len(answer), len(label)) > 4 * MAX_ALGEBRA_CHARS:  # typography alone would cost milliseconds
        return answer.strip() == label.strip()
    left, right = normalize(answer), normalize(label)
    if not left or not right:
        return False
    if compact(left) == compact(right):
        return True
    longest = max(len(left), len(right))
    if longest > MAX_ALGEBRA_CHARS or max(bracket_depths(left) + bracket_depths(right)) > _MAX_NESTING:
        return False
    return _equal(left, right, algebra)


def _equal(left: str, right: str, algebra: Algebra) -> Verdict:
    left, right = _MEMBER.sub("", trim(left)), _MEMBER.sub("", trim(right))
    if not left or not right:
        return False
    if compact(left) == compact(right):
        return True
    left_number, right_number = _number(left), _number(right)
    if left_number is None and right_number is not None and right_number.unit:
        left_number = parse_quantity(left, attached_letters=True)
    elif right_number is None and left_number is not None and left_number.unit:
        right_number = parse_quantity(right, attached_letters=True)
    if left_number is not None and right_number is not None:
        return quantities_equal(left_number, right_number)
    if is_too_large(left) or is_too_large(right):
        return False
    verdict = _compare_collections(left, right, algebra)
    if verdict is not None:
        return verdict.result
    verdict = _compare_assignments(left, right, algebra)
    if verdict is not None:
        return verdict.result
    if _is_text(left) or _is_text(right):
        return _compare_texts(left, right, algebra)
    return _compare_expressions(left, right, algebra)


def _number(text: str) -> Quantity | None:
    """`(1,250)` is a pair, whatever `1,250` may be."""
    is_tuple = text[0] in "([" and "," in text and _spans(text)
    return None if is_tuple else parse_quantity(text)


@dataclass(frozen=True, slots=True)
class _Decided:
    """A verdict that is final for its kind, to tell it from "not of this kind"."""

    result: Verdict


def _compare_collections(left: str, right: str, algebra: Algebra) -> _Decided | None:
    if "\\begin" in left or "\\begin" in right:
        return None
    unions = _pieces(left), _pieces(right)
    if len(unions[0]) > 1 and len(unions[0]) == len(unions[1]):
        verdict = _match_any_order(*unions, algebra)
        if verdict is not False:
            return _Decided(verdict)
    if max(map(len, unions)) > 1:
        return None  # overlapping pieces may still be the same set
    a, b = _Collection.parse(left), _Collection.parse(right)
    if a is None and b is None:
        return None
    if a is None or b is None:
        lone, single = (b, left) if a is None else (a, right)
        assert lone is not None
        if lone.kind == "set" and len(lone.items) == 1:
            pair = (single, lone.items[0]) if a is None else (lone.items[0], single)
            return _Decided(_equal(*pair, algebra))
        is_relation = _RELATION.search(single) or _EQUALS.search(single) or "\\" in single
        return None if is_relation and parse_quantity(single) is None else _Decided(False)
    if len(a.items) != len(b.items):
        return _Decided(False)
    if a.kind == b.kind == "ordered":
        return _Decided(_all_in_order(a.items, b.items, algebra) if a.brackets == b.brackets else False)
    kinds = {a.kind, b.kind}
    if "ordered" in kinds:
        # A point without its parentheses is still that point; a set or a half-open interval is not.
        ordered = a if a.kind == "ordered" else b
        is_point = "set" not in kinds and ordered.brackets == "()"
        return _Decided(_all_in_order(a.items, b.items, algebra) if is_point else False)
    return _Decided(_match_any_order(a.items, b.items, algebra))


def _pieces(text: str) -> list[str]:
    """Of a union: `(-\\infty,3)\\cup(5,\\infty)`, or `x<3 or x>5`."""
    return split_top(text, _OR if _RELATION.search(text) else _CUP)


@dataclass(frozen=True, slots=True)
class _Collection:
    """A list `2,9` (any order), an ordered tuple or interval `(2,9)`, or a set `\\{2,9\\}`."""

    kind: Literal["list", "ordered", "set"]
    brackets: str
    items: list[str]

    @classmethod
    def parse(cls, text: str) -> "_Collection | None":
        if text.startswith("\\{") and text.endswith("\\}") and _spans(text[1:-2] + "}"):
            inner = text[2:-2].strip()
            return cls("set", "{}", _items(inner, in_brackets=True) if inner else [])
        if text[0] in "([" and text[-1] in ")]" and _spans(text):
            items = _items(text[1:-1], in_brackets=True)
            return cls("ordered", text[0] + text[-1], items) if len(items) > 1 else None
        if _PLUS_MINUS.search(text):
            return cls("list", "", [_PLUS_MINUS.sub(sign, text).strip().removeprefix("+") for sign in ("+", "-")])
        items = _items(text, in_brackets=False)
        return cls("list", "", items) if len(items) > 1 else None


def _items(text: str, *, in_brackets: bool) -> list[str]:
    """Elements between top-level commas. Where commas with and without a space are mixed, the tight ones separate
    thousands.
    """
    tight = split_top(text, _COMMA)
    spaced = split_top(text, _SPACED_COMMA)
    if 1 < len(spaced) < len(tight) and all(parse_quantity(part.strip()) is not None for part in spaced):
        return [part.strip() for part in spaced]
    if not in_brackets and _names_quantity(text):
        return [text]
    return [part.strip() for part in tight if part.strip()]


def _names_quantity(text: str) -> bool:
    """`1,250` and `x=1,250` are one number, not two items."""
    sides = split_top(text, _EQUALS)
    return len(sides) <= 2 and bool(sides[-1].strip()) and parse_quantity(sides[-1].strip()) is not None


def _spans(text: str) -> bool:
    """Whether the first bracket closes with the last character."""
    depths = bracket_depths(text)
    return len(text) > 1 and depths[-1] == 0 and all(depth > 0 for depth in depths[1:-1])


def _all_in_order(left: list[str], right: list[str], algebra: Algebra) -> Verdict:
    unknown = False
    for a, b in zip(left, right, strict=True):
        verdict = _equal(a, b, algebra)
        if verdict is False:
            return False
        unknown = unknown or verdict is None
    return None if unknown else True


def _match_any_order(left: list[str], right: list[str], algebra: Algebra) -> Verdict:
    if len(left) > _MAX_ITEMS:
        return sorted(map(compact, left)) == sorted(map(compact, right))
    remaining = list(right)
    unknown = False
    for item in left:
        verdicts = [_equal(item, other, algebra) for other in remaining]
        if True in verdicts:
            del remaining[verdicts.index(True)]
        elif None in verdicts:
            unknown = True
        else:
            return False
    return None if unknown else True


def _compare_assignments(left: str, right: str, algebra: Algebra) -> _Decided | None:
    """`x = 5` names the number 5; `x = 5` and `y = 5` differ; a chain of equal signs counts by its ends."""
    (left_name, left_value), (right_name, right_value) = _split_assignment(left), _split_assignment(right)
    if left_name is None and right_name is None:
        return None
    if left_name is not None and right_name is not None:
        if compact(left_name) != compact(right_name):
            return _Decided(False) if parse_quantity(left_value) or parse_quantity(right_value) else None
        return _Decided(_equal(left_value, right_value, algebra))
    other = right if left_name is not None else left
    if _EQUALS.search(other) or _RELATION.search(other):
        return None
    return _Decided(_equal(left_value, right_value, algebra))


def _split_assignment(text: str) -> tuple[str | None, str]:
    parts = split_top(text, _EQUALS)
    first, last = parts[0].strip(), parts[-1].strip()
    if len(parts) < 2 or not first or not last:
        return None, text
    if _ASSIGNED.fullmatch(first):
        return first, last
    if len(parts) == 2 and _ASSIGNED.fullmatch(last) and parse_quantity(first) is not None:
        return last, first
    return None, text


def _is_text(text: str) -> bool:
    """Words rather than algebra: multiplying their letters would make every anagram equal."""
    if _TEXT.search(text) or _CLOCK.search(text):
        return True
    words = _WORD.findall(_ENVIRONMENT.sub("", text))
    return any(word.lower() not in _FUNCTIONS for word in words)


def _compare_texts(left: str, right: str, algebra: Algebra) -> Verdict:
    if _text_key(left) == _text_key(right):
        return True
    (left_core, left_unit, _), (right_core, right_unit, _) = split_unit(left), split_unit(right)
    if (left_core, right_core) == (left, right) or _is_text(left_core) or _is_text(right_core):
        return False
    if not left_core or not right_core or (left_unit and right_unit and left_unit != right_unit):
        return False
    return _equal(left_core, right_core, algebra)


def _text_key(text: str) -> str:
    words = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text).casefold()
    words = " ".join(re.sub(r"[.,;:!?\"'*]", " ", words).split())
    return re.sub(r"^\((\w+)\)$", r"\1", words)


def _compare_expressions(left: str, right: str, algebra: Algebra) -> Verdict:
    (left_core, left_unit, left_percent), (right_core, right_unit, right_percent) = split_unit(left), split_unit(right)
    if left_unit and right_unit and left_unit != right_unit:
        return False
    if left_percent or right_percent:
        return algebra(left, right)
    if re.sub(r"^\((\w)\)$", r"\1", left) == re.sub(r"^\((\w)\)$", r"\1", right):
        return True
    if (
        not any(char.isdigit() for char in left + right)
        and min(len(left), len(right)) == 1
        and max(len(left), len(right)) <= 3
    ):
        return left.strip("()").casefold() == right.strip("()").casefold()
    bases = _BASE.fullmatch(left_core), _BASE.fullmatch(right_core)
    if bases[0] and bases[1] and bases[0][2] != bases[1][2]:
        return False  # the same digits in base 5 and base 6; algebra would take the base for a decoration
    for based, plain in ((bases[0], right_core), (bases[1], left_core)):
        if based and plain.isdigit():
            return based[2] == "10" and based[1].lstrip("0") == plain.lstrip("0")
    if _SPACED_DIGITS.search(left_core + "|" + right_core):
        return False  # two numbers side by side; algebra would add or multiply them
    return algebra(left_core, right_core)
