"""Equivalence of two expressions by computer algebra: math-verify parses and judges, numbers have the last word.

math-verify rounds differences to zero (at 6 decimals, at 15 digits of the larger term), so two tiny numbers compare
equal; and sympy's `simplify` misses identities. Where both expressions can be evaluated, 50 digits at a few rational
points decide; relations and sets are math-verify's.

Imported by the algebra process only: sympy takes a second to import, and an expression can make it run for ever or out
of memory.
"""

import logging
import re
from fractions import Fraction
from typing import Any

import sympy
from math_verify import LatexExtractionConfig, parse, verify
from sympy import Basic, Expr, MatrixBase
from sympy.core.relational import Relational

from rlkit.rewards.equivalence import answers_equal
from rlkit.rewards.exact_numbers import decimal_places, exact_value
from rlkit.rewards.quantities import is_rounding

_DIGITS = 50
_RELATIVE_TOLERANCE = sympy.Rational(1, 10**35)
_POINTS = (sympy.Rational(7, 5), sympy.Rational(-11, 13), sympy.Rational(23, 9))
_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\s*\^\s*\\circ(?![A-Za-z])")
_SYMBOL = re.compile(r"\\[A-Za-z]+|[A-Za-z](?!_)")
_EXTRACTION = (LatexExtractionConfig(boxed_match_priority=0),)


def symbolic_equal(answer: str, label: str) -> bool:
    """`answers_equal` with algebra behind it: what neither structure nor algebra can confirm is not equal."""
    return bool(answers_equal(answer, label, expressions_equal))


def expressions_equal(answer: str, label: str) -> bool:
    """Whether two normalised expressions without collections in them are the same."""
    answer, label = _keep_case(answer, label)
    parsed_answer, parsed_label = _parse(answer), _parse(label)
    left, right = _expression(parsed_answer), _expression(parsed_label)
    if isinstance(left, MatrixBase) and isinstance(right, MatrixBase):
        return left.shape == right.shape and all(
            _values_agree(a, b) is True for a, b in zip(left.flat(), right.flat(), strict=True)
        )
    if isinstance(left, Expr) and isinstance(right, Expr):
        verdict = _decimal_agrees(answer, right, label, left)
        verdict = _values_agree(left, right) if verdict is None else verdict
        if verdict is not None:
            return verdict
    return bool(verify(parsed_label, parsed_answer, timeout_seconds=None, allow_set_relation_comp=True))


def warm_up() -> None:
    """Fill parser and sympy caches, so that the first real request does not pay for them out of its deadline."""
    logging.getLogger("math_verify").setLevel(
        logging.ERROR
    )  # its notice that the caller must bound the time: the process does
    for answer, label in (
        ("\\sqrt{8}", "2\\sqrt{2}"),
        ("(x+1)^2", "x^2+2x+1"),
        ("2<x<9", "(2,9)"),
        ("y=2x+1", "2x=y-1"),
    ):
        expressions_equal(answer, label)


def _keep_case(*texts: str) -> tuple[str, ...]:
    """Mark capital variables whose small letter occurs too: the parser reads every symbol in lower case, and R - r is
    not 0.
    """
    letters = {symbol for text in texts for symbol in _SYMBOL.findall(text) if len(symbol) == 1}
    both = {letter for letter in letters if letter.isupper() and letter.lower() in letters}
    if not both:
        return texts
    return tuple(
        _SYMBOL.sub(lambda match: match[0] + "_{cap}" if match[0] in both else match[0], text) for text in texts
    )


def _parse(text: str) -> list[Any]:
    """math-verify's readings of one expression: a sympy object if it could be parsed, and the text itself."""
    text = _DEGREES.sub(r"(\1 \\cdot \\pi / 180)", text)
    return parse(f"\\boxed{{{text}}}", extraction_config=_EXTRACTION, parsing_timeout=0)


def _expression(parsed: list[Any]) -> Basic | MatrixBase | None:
    """The sympy object with decimals made exact and `i` read as the imaginary unit where it stands for nothing else."""
    found = next((item for item in parsed if isinstance(item, Basic | MatrixBase)), None)
    if found is None or isinstance(found, Relational):
        return found
    floats = {number: sympy.Rational(str(number)) for number in found.atoms(sympy.Float)}
    imaginary = {symbol: sympy.I for symbol in found.free_symbols if str(symbol) == "i"}
    return found.xreplace({**floats, **imaginary})


def _decimal_agrees(answer: str, label_value: Expr, label: str, answer_value: Expr) -> bool | None:
    """A decimal against a constant: it must be its rounding. None when neither text is a decimal, or the other has no
    real value.
    """
    for text, other in ((answer, label_value), (label, answer_value)):
        places, value = decimal_places(text), exact_value(text)
        if places is not None and value is not None and not other.free_symbols:
            exact = _evaluate(other)
            if exact is None or not exact.is_real:
                return None
            return is_rounding(value, places, Fraction(str(exact)))
    return None


def _values_agree(left: Expr, right: Expr) -> bool | None:
    """Whether two expressions have the same values at the test points; None when they cannot be evaluated there."""
    symbols = sorted(left.free_symbols | right.free_symbols, key=str)
    compared = False
    for shift in range(len(_POINTS) if symbols else 1):
        point = {symbol: _POINTS[(shift + place) % len(_POINTS)] + place for place, symbol in enumerate(symbols)}
        a, b = _evaluate(left.xreplace(point)), _evaluate(right.xreplace(point))
        if a is None or b is None:
            continue
        compared = True
        if abs(a - b) > _RELATIVE_TOLERANCE * max(abs(a), abs(b)):
            return False
    return True if compared else None


def _evaluate(expression: Any) -> Expr | None:
    """Numeric value to 50 digits, or None when the expression has no finite one."""
    try:
        value = expression.doit().evalf(_DIGITS)
    except (
        TypeError,
        ValueError,
        ArithmeticError,
        AttributeError,
    ):  # what sympy raises for sums, limits and relations inside
        return None
    return (
        value if isinstance(value, Expr) and value.is_number and value.is_finite and not value.has(sympy.nan) else None
    )
