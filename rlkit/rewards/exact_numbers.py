"""Exact value of a number as people write it: `1,250`, `073`, `2\\frac{1}{2}`, `1.5\\times 10^{3}`, `0.1\\overline{6}`.
Called by `equivalence.py`.

Rational arithmetic only, with bounds on size and nesting, so every call returns in well under a millisecond and never
rounds.
"""

import math
import re
from fractions import Fraction

MAX_CHARS = 1000
_MAX_BITS = 100_000
_MAX_DEPTH = 40
_MAX_FACTORIAL = 2000

_GROUPED = r"[1-9]\d{0,2}(?:,\d{3})+(?![\d,])|[1-9]\d{0,2}(?: \d{3})+(?! ?\d)"
_TOKEN = re.compile(
    rf"(?P<repeating>(?:\d*\.\d*)\\overline\s*\{{\d{{1,30}}\}})"
    rf"|(?P<number>(?:{_GROUPED})(?:\.\d+)?|\d+\.\d+|\.\d+|\d+\.?)(?P<exponent>[eE][+-]?\d{{1,4}}(?![\w.]))?"
    r"|(?P<command>\\frac|\\times|\\cdot)(?![A-Za-z])"
    r"|(?P<symbol>\*\*|[-+*/^(){}!])"
)
_DECIMAL = re.compile(rf"[-+]?\s*(?:(?:{_GROUPED})|\d*)\.(\d+)")
_SLASH_MIXED = re.compile(r"(?<![\d.,])(\d+) (\d+/\d+)(?![\d.])")


class _NotANumberError(Exception):
    """The text holds something else than rational arithmetic."""


class _TooLargeError(Exception):
    """The text is rational arithmetic, but its value has more than 30,000 digits."""


def exact_value(text: str) -> Fraction | None:
    """Value of a purely numeric expression; None when it is not one, or when it is too large to be worth computing."""
    try:
        return _evaluate(text)
    except (_NotANumberError, _TooLargeError):
        return None


def is_too_large(text: str) -> bool:
    """Whether this is a number that nobody can compute, like `9^{9^{9}}`: it equals nothing but its own spelling."""
    try:
        _evaluate(text)
    except _TooLargeError:
        return True
    except _NotANumberError:
        return False
    return False


def _evaluate(text: str) -> Fraction:
    if len(text) > MAX_CHARS or not any(char.isdigit() for char in text):
        raise _NotANumberError
    parser = _Parser(_tokens(_SLASH_MIXED.sub(_spell_mixed, text)))
    try:
        value = parser.sum(depth=0)
    except ZeroDivisionError:
        raise _NotANumberError from None
    parser.expect_end()
    return value


def decimal_places(text: str) -> int | None:
    """Digits behind the point of a plain decimal such as `-12.50`; None for every other writing."""
    match = _DECIMAL.fullmatch(text.strip())
    return len(match.group(1)) if match else None


def _spell_mixed(match: re.Match[str]) -> str:
    numerator, denominator = match.group(2).split("/")
    return f"{match.group(1)}\\frac{{{numerator}}}{{{denominator}}}"


def _tokens(text: str) -> list[tuple[str, str]]:
    tokens: list[tuple[str, str]] = []
    position = 0
    while position < len(text):
        if text[position] == " ":
            position += 1
            continue
        match = _TOKEN.match(text, position)
        if match is None or not match.group().isascii():
            raise _NotANumberError
        kind = match.lastgroup or ""
        tokens.append(("number" if kind == "exponent" else kind, match.group()))
        position = match.end()
    return tokens


class _Parser:
    """Recursive descent over the tokens; every rule returns an exact value."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self._tokens = tokens
        self._next = 0

    def sum(self, depth: int) -> Fraction:
        if depth > _MAX_DEPTH:
            raise _NotANumberError
        value = self._signed_product(depth)
        while self._peek() in ("+", "-"):
            sign = self._take()
            term = self._product(depth)
            value = _bounded(value + term if sign == "+" else value - term)
        return value

    def expect_end(self) -> None:
        if self._next != len(self._tokens):
            raise _NotANumberError

    def _signed_product(self, depth: int) -> Fraction:
        if self._peek() in ("+", "-"):
            sign = self._take()
            value = self._product(depth)
            return -value if sign == "-" else value
        return self._product(depth)

    def _product(self, depth: int) -> Fraction:
        value = self._power(depth)
        while True:
            token = self._peek()
            if token in ("*", "\\times", "\\cdot"):
                self._take()
                value = _bounded(value * self._signed_power(depth))
            elif token == "/":
                self._take()
                value = _bounded(value / self._signed_power(depth))
            elif token in ("(", "\\frac"):
                value = _bounded(value * self._power(depth))
            else:
                return value

    def _signed_power(self, depth: int) -> Fraction:
        if self._peek() == "-":
            self._take()
            return -self._power(depth)
        return self._power(depth)

    def _power(self, depth: int) -> Fraction:
        if depth > _MAX_DEPTH:
            raise _NotANumberError
        base = self._atom(depth)
        while self._peek() == "!":
            self._take()
            base = _bounded_factorial(base)
        if self._peek() not in ("^", "**"):
            return base
        self._take()
        is_negative = self._peek() == "-" and bool(self._take())
        exponent = self._power(depth + 1)  # towers are read from the right
        return _bounded_power(base, -exponent if is_negative else exponent)

    def _atom(self, depth: int) -> Fraction:
        if self._next >= len(self._tokens):
            raise _NotANumberError
        kind, token = self._tokens[self._next]
        self._next += 1
        if kind == "repeating":
            return _repeating(token)
        if kind == "number":
            value = _plain(token)
            return self._mixed(value, depth) if token.isdigit() and self._peek() == "\\frac" else value
        if token == "\\frac":
            numerator = self._group("{", "}", depth)
            return _bounded(numerator / self._group("{", "}", depth))
        if token in ("(", "{"):
            self._next -= 1
            return self._group(token, ")" if token == "(" else "}", depth)
        raise _NotANumberError

    def _mixed(self, whole: Fraction, depth: int) -> Fraction:
        """`2\\frac{1}{2}` is two and a half; anything but a proper fraction behind an integer is ambiguous."""
        fraction = self._atom(depth)
        if not 0 < fraction < 1:
            raise _NotANumberError
        return whole + fraction

    def _group(self, opening: str, closing: str, depth: int) -> Fraction:
        if self._peek() != opening:
            raise _NotANumberError
        self._take()
        value = self.sum(depth + 1)
        if self._peek() != closing:
            raise _NotANumberError
        self._take()
        return value

    def _peek(self) -> str | None:
        return self._tokens[self._next][1] if self._next < len(self._tokens) else None

    def _take(self) -> str:
        self._next += 1
        return self._tokens[self._next - 1][1]


def _plain(token: str) -> Fraction:
    mantissa, _, exponent = token.lower().partition("e")
    value = Fraction(mantissa.replace(",", "").replace(" ", "").rstrip("."))
    return _bounded_power(Fraction(10), Fraction(int(exponent))) * value if exponent else value


def _repeating(token: str) -> Fraction:
    head, _, tail = token.partition("\\overline")
    digits = tail.strip(" {}")
    places = len(head.partition(".")[2])
    start = Fraction(f"{head}0") if head.endswith(".") or head.startswith(".") else Fraction(head)
    return start + Fraction(int(digits), (10 ** len(digits) - 1) * 10**places)


def _bounded(value: Fraction) -> Fraction:
    if value.numerator.bit_length() > _MAX_BITS or value.denominator.bit_length() > _MAX_BITS:
        raise _TooLargeError
    return value


def _bounded_factorial(value: Fraction) -> Fraction:
    if value.denominator != 1 or value < 0:
        raise _NotANumberError
    if value > _MAX_FACTORIAL:
        raise _TooLargeError
    return Fraction(math.factorial(int(value)))


def _bounded_power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise _NotANumberError
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits > 1 and abs(exponent) * bits > _MAX_BITS:
        raise _TooLargeError
    return base ** int(exponent)
