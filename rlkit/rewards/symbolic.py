"""Equivalence of two expressions by computer algebra (math-verify over sympy), with its known false positives caught.

Imported by the algebra process only: sympy takes a second to import, and an expression can make it run for ever or out of memory.
"""

import logging
from collections.abc import Iterable
from fractions import Fraction

import sympy
from math_verify import LatexExtractionConfig, parse, verify
from sympy import Basic, Expr, MatrixBase
from sympy.core.relational import Relational

from rlkit.rewards.equivalence import answers_equal
from rlkit.rewards.exact_numbers import decimal_places, exact_value
from rlkit.rewards.quantities import is_rounding

_DIGITS = 40
_RELATIVE_TOLERANCE = sympy.Rational(1, 10**20)
_POINTS = (Fraction(7, 5), Fraction(-11, 13), Fraction(23, 9))  # rational points at which unequal expressions hardly meet
_EXTRACTION = (LatexExtractionConfig(boxed_match_priority=0),)


def symbolic_equal(answer: str, label: str) -> bool:
    """`answers_equal` with algebra behind it: what neither structure nor algebra can confirm is not equal."""
    return bool(answers_equal(answer, label, expressions_equal))


def expressions_equal(answer: str, label: str) -> bool:
    """Whether two single expressions are the same by math-verify, and also agree numerically wherever that can be computed."""
    parsed_answer, parsed_label = _parse(answer), _parse(label)
    if not verify(parsed_label, parsed_answer, timeout_seconds=None, allow_set_relation_comp=True):
        return _agree_as_constants(answer, parsed_answer, label, parsed_label)
    return _is_confirmed(answer, _first_expression(parsed_answer), label, _first_expression(parsed_label))


def warm_up() -> None:
    """Fill parser and sympy caches, so that the first real request does not pay for them out of its deadline."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    for answer, label in (("\\sqrt{8}", "2\\sqrt{2}"), ("(x+1)^2", "x^2+2x+1"), ("x<3", "x>4"), ("y=2x", "2y=x")):
        expressions_equal(answer, label)


def _parse(text: str) -> list[Basic | MatrixBase | str]:
    return parse(f"\\boxed{{{text}}}", extraction_config=_EXTRACTION, parsing_timeout=None)


def _first_expression(parsed: Iterable[Basic | MatrixBase | str]) -> Basic | MatrixBase | None:
    return next((item for item in parsed if not isinstance(item, str)), None)


def _agree_as_constants(answer: str, parsed_answer: list, label: str, parsed_label: list) -> bool:
    """Whether both are numbers with the same value to 20 digits, e.g. `e^{i\\pi}` and -1, which math-verify does not relate."""
    left, right = _first_expression(parsed_answer), _first_expression(parsed_label)
    if not isinstance(left, Expr) or not isinstance(right, Expr):
        return False
    imaginary = {symbol: sympy.I for symbol in left.free_symbols | right.free_symbols if str(symbol) == "i"}
    left, right = left.subs(imaginary), right.subs(imaginary)
    if left.free_symbols or right.free_symbols:
        return False
    return _values_agree(answer, left, label, right) is True


def _is_confirmed(answer: str, left: Basic | MatrixBase | None, label: str, right: Basic | MatrixBase | None) -> bool:
    """Second opinion on a positive verdict: math-verify rounds differences to zero, at 6 decimals or at 15 digits of the terms."""
    if left is None or right is None:
        return True  # equal as strings
    if isinstance(left, Relational) and not isinstance(right, Relational):
        left = left.args[-1]
    if isinstance(right, Relational) and not isinstance(left, Relational):
        right = right.args[-1]
    if isinstance(left, MatrixBase) and isinstance(right, MatrixBase):
        return all(_expressions_agree(a, b) for a, b in zip(left.flat(), right.flat(), strict=True))
    if not isinstance(left, Expr) or not isinstance(right, Expr):
        return True
    if left.free_symbols or right.free_symbols:
        return _expressions_agree(left, right)
    return _values_agree(answer, left, label, right) is not False


def _expressions_agree(left: Expr, right: Expr) -> bool:
    symbols = sorted(left.free_symbols | right.free_symbols, key=str)
    for shift in range(len(_POINTS)):
        point = {
            symbol: sympy.Rational(_POINTS[(shift + index) % len(_POINTS)]) + index for index, symbol in enumerate(symbols)
        }
        if _numbers_agree(left.subs(point), right.subs(point)) is False:
            return False
    return True


def _values_agree(answer: str, left: Expr, label: str, right: Expr) -> bool | None:
    """Constants by their digits; a written decimal must be the rounding of the other value."""
    for text, other in ((answer, right), (label, left)):
        places, value = decimal_places(text), exact_value(text)
        if places is not None and value is not None:
            exact = other.doit().evalf(_DIGITS)
            return exact.is_real and is_rounding(value, places, Fraction(str(exact)))
    return _numbers_agree(left, right)


def _numbers_agree(left: Expr, right: Expr) -> bool | None:
    """None where one of them has no numeric value."""
    a, b = left.doit().evalf(_DIGITS), right.doit().evalf(_DIGITS)
    if not (a.is_number and b.is_number and a.is_finite and b.is_finite):
        return None
    scale = max(abs(a), abs(b))
    return bool(abs(a - b) <= _RELATIVE_TOLERANCE * scale)
