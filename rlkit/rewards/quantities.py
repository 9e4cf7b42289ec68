"""A number with what stands around it: currency, percent sign, degree, unit. Called by `equivalence.py`.

Rules: a unit that only one side writes does not matter; two different known units are two different answers; `35%`,
`35` and `0.35` are the same answer (data sets disagree on which they store); a decimal equals an exact value when it is
its rounding to at least six digits.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

from rlkit.rewards.exact_numbers import decimal_places, exact_value

_MIN_ROUNDED_DIGITS = 6
_BINARY_DIGITS = 15  # a decimal this long came out of a float
_CURRENCIES = {
    "\u00a4": "dollar",
    "€": "euro",
    "£": "pound sterling",
    "¥": "yen",
    "₹": "rupee",
    "₽": "ruble",
    "₩": "won",
    "USD": "dollar",
    "EUR": "euro",
    "GBP": "pound sterling",
    "INR": "rupee",
    "Rs": "rupee",
}
_PREFIX = re.compile(
    r"([-+]?)\s*(?:(?:US|USD)?\s*([\u00a4€£¥₹₽₩])|(?:\\text\{\s*)?(USD|EUR|GBP|INR|Rs)\b\.?\s*\}?(?=\s*\d))\s*"
)
_PERCENT = re.compile(
    r"(?:%|\s*\\text\{\s*(?:percent|per cent|pct)\.?\s*\}|\s*\b(?:percent|per cent|pct)\b\.?)$", re.IGNORECASE
)
_DEGREE = re.compile(r"\s*\^\s*\{?\s*\\circ\s*\}?\s*(?:\\text\{\s*)?([CFK]?)\s*\}?$")
_POWER = r"(?:\s*\^\s*\{?\s*(\d)\s*\}?)?"
_TEXT_UNIT = re.compile(rf"\s*\\text\{{([^{{}}\d=]*)\}}{_POWER}$")
_BARE_UNIT = re.compile(rf"(?<=[\d)}}])(\s*)([A-Za-z]+(?:[ /][A-Za-z]+){{0,3}}){_POWER}$")
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_NOTE = re.compile(r"(?<=[\d)}]) \(([A-Za-z][A-Za-z ]{2,40})\)$")
_LETTER_UNITS = frozenset("mshglLNJW")
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_SCALE_WORDS = re.compile(rf"({'|'.join(_SCALES)})\b\s*", re.IGNORECASE)
_ARITHMETIC_WORDS = re.compile(
    r"\b(?:plus|minus|times|over|divided|squared|cubed|root|and|or|to|by|of|half|halves|thirds?|quarters?|factorial|modulo|mod"
    r"|pi|sin|cos|tan|log|ln|exp|sqrt|if|when|for)\b"
)

_UNIT_SPELLINGS = {
    "millimeter": "mm millimeter millimetre",
    "centimeter": "cm centimeter centimetre",
    "meter": "m meter metre",
    "kilometer": "km kilometer kilometre",
    "inch": "in inch inche",
    "foot": "ft foot feet",
    "yard": "yd yard",
    "mile": "mi mile",
    "milligram": "mg milligram",
    "gram": "g gram",
    "kilogram": "kg kilogram",
    "pound": "lb pound",
    "ounce": "oz ounce",
    "ton": "ton tonne",
    "milliliter": "ml milliliter millilitre",
    "liter": "l liter litre",
    "gallon": "gal gallon",
    "second": "s sec second",
    "minute": "min minute",
    "hour": "h hr hour",
    "day": "day",
    "week": "week",
    "month": "month",
    "year": "yr year",
    "dollar": "dollar usd",
    "cent": "cent",
    "euro": "euro eur",
    "rupee": "rupee rs",
    "degree": "deg degree",
    "radian": "rad radian",
    "kilometer per hour": "km/h kph kmh km/hr kilometer per hour",
    "mile per hour": "mph mi/h mile per hour",
    "meter per second": "m/s meter per second",
    "newton": "n newton",
    "joule": "j joule",
    "watt": "w watt",
    "kelvin": "kelvin",
}
_PHRASES = {"kilometer per hour", "mile per hour", "meter per second"}


def _unit_table() -> dict[str, str]:
    table: dict[str, str] = {}
    for unit, spellings in _UNIT_SPELLINGS.items():
        words = spellings.removesuffix(unit).split() if unit in _PHRASES else spellings.split()
        table.update(dict.fromkeys([*words, unit], unit))
    return table


_UNITS = _unit_table()


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantity:
    """A numeric answer."""

    value: Fraction
    is_percent: bool
    unit: str | None
    """Canonical name of a known unit with its power, e.g. `centimeter^2`; None when there is none or it is not known.
    """
    places: int | None
    """Digits behind the point when the number was written as a plain decimal."""


def parse_quantity(text: str, *, attached_letters: bool = False) -> Quantity | None:
    """A normalised answer as a number with its trimmings, or None when it is not one number."""
    core, unit, is_percent = split_unit(text, attached_letters=attached_letters)
    value = exact_value(core)
    if value is None:
        return None
    return Quantity(value=value, is_percent=is_percent, unit=unit, places=decimal_places(core))


def split_unit(text: str, *, attached_letters: bool = False) -> tuple[str, str | None, bool]:
    """(expression without its unit, canonical unit or None, is a percentage). Words that scale a number are multiplied
    in.

    `5 m` is five metres; `5m` is a product with a variable, unless `attached_letters` says that a unit is expected.
    """
    unit: str | None = None
    prefix = _PREFIX.match(text)
    if prefix:
        unit = _CURRENCIES[prefix.group(2) or prefix.group(3)]
        text = prefix.group(1) + text[prefix.end() :]
    if percent := _PERCENT.search(text):
        return text[: percent.start()].strip(), unit, True
    if (degree := _DEGREE.search(text)) and not _TRIGONOMETRY.search(text):
        scale = {"C": "celsius", "F": "fahrenheit", "K": "kelvin"}.get(degree.group(1), "degree")
        return text[: degree.start()].strip(), scale, False
    if note := _NOTE.search(text):  # 5 (five)
        text = text[: note.start()]
    found: tuple[int, str | None] | None = None
    if match := _TEXT_UNIT.search(text):
        found = _read_unit(match.group(1), match.group(2), is_marked=True)
    elif match := _BARE_UNIT.search(text):
        gap, words, power = match.groups()
        if len(words) > 1 or (words in _LETTER_UNITS and (gap or attached_letters)):
            found = _read_unit(words, power, is_marked=False)
    if match is None or found is None:
        return text, unit, False
    factor, name = found
    core = text[: match.start()].strip()
    core = core if factor == 1 or not core else f"({core})*{factor}"
    return core, name or unit, False


def _read_unit(words: str, power: str | None, *, is_marked: bool) -> tuple[int, str | None] | None:
    """(scale factor, canonical unit or None) of the words behind a number; None when they are not a unit but part of
    the mathematics.
    """
    phrase = " ".join(words.replace(".", " ").lower().split())
    for prefix, prefix_power in (("square ", "2"), ("sq ", "2"), ("cubic ", "3")):
        if phrase.startswith(prefix):
            phrase, power = phrase.removeprefix(prefix), prefix_power
    factor = 1
    scale = _SCALE_WORDS.match(phrase)
    if scale:
        factor, phrase = _SCALES[scale.group(1).lower()], phrase[scale.end() :]
    if not phrase:
        return factor, None
    if _ARITHMETIC_WORDS.search(phrase):
        return None
    name = _UNITS.get(phrase) or _UNITS.get(_singular(phrase))
    if name is None:
        # An unknown word counts as the thing that was counted ("18 apples"); one or two bare letters are variables.
        is_word = is_marked or all(len(word) > 2 for word in re.split("[ /]", phrase))
        return (factor, None) if is_word else None
    return factor, f"{name}^{power}" if power and power != "1" else name


def _singular(phrase: str) -> str:
    head, space, rest = phrase.partition(" per ")
    return head.removesuffix("s") + space + rest


def quantities_equal(left: Quantity, right: Quantity) -> bool:
    if left.unit is not None and right.unit is not None and left.unit != right.unit:
        return False
    if left.is_percent == right.is_percent:
        return _values_equal(left.value, left.places, right.value, right.places)
    percent, plain = (left, right) if left.is_percent else (right, left)
    if plain.unit is not None:
        return False
    if _values_equal(percent.value, percent.places, plain.value, plain.places):
        return True
    places = None if percent.places is None else percent.places + 2
    return _values_equal(percent.value / 100, places, plain.value, plain.places)


def _values_equal(left: Fraction, left_places: int | None, right: Fraction, right_places: int | None) -> bool:
    if left == right:
        return True
    for value, places, other, other_places in (
        (left, left_places, right, right_places),
        (right, right_places, left, left_places),
    ):
        is_exact = other_places is None and other.denominator != 1
        is_float = other_places is not None and significant_digits(other, other_places) >= _BINARY_DIGITS
        if places is not None and (is_exact or is_float) and is_rounding(value, places, other):
            return True
    return False


def significant_digits(value: Fraction, places: int) -> int:
    """Digits of a decimal with `places` digits behind the point, leading zeros not counted."""
    return len(str(abs(value.numerator * 10**places // value.denominator)).lstrip("0"))


def is_rounding(value: Fraction, places: int, exact: Fraction) -> bool:
    """Whether a decimal written with `places` digits is `exact` rounded to them, and has digits enough to tell."""
    if significant_digits(value, places) < _MIN_ROUNDED_DIGITS:
        return False
    return abs(value - exact) * 2 * 10**places <= 1
