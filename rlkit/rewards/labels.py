"""Labels and responses of any JSON type as text. Called by the graders.

Only None, the empty string and NaN mean "no label"; 0 and False are values. A number is graded as its decimal text, a
list holds alternatives.
"""

import math
from decimal import Decimal
from numbers import Integral, Real

_MAX_INTEGER_BITS = 10_000  # Python refuses to print longer integers; nobody writes them as an answer


def response_text(response: object) -> str:
    """A response as text: bytes are decoded, numbers printed; None and containers are empty."""
    if isinstance(response, str):
        return response
    if isinstance(response, bytes | bytearray | memoryview):
        return bytes(response).decode("utf-8", errors="replace")
    texts = _number_texts(response)
    return texts[0] if texts else ""


def label_texts(label: object) -> tuple[str, ...]:
    """Accepted answers as text; empty when the label is missing. A list holds alternatives, lists inside it are not
    looked into.
    """
    if isinstance(label, list | tuple | set | frozenset):
        return tuple(text for item in label for text in _scalar_texts(item))
    return _scalar_texts(label)


def _scalar_texts(label: object) -> tuple[str, ...]:
    if isinstance(label, str | bytes):
        text = response_text(label).strip()
        return (text,) if text else ()
    return _number_texts(label)


def _number_texts(value: object) -> tuple[str, ...]:
    """Writings of a number, the plain one first; empty for NaN, infinities and everything that is not a number."""
    if isinstance(value, bool):
        return (str(value),)
    if isinstance(value, Integral):
        integer = int(value)
        return (str(integer),) if integer.bit_length() <= _MAX_INTEGER_BITS else ()
    if isinstance(value, Real):
        number = float(value)
        if not math.isfinite(number):
            return ()
        # 15 digits are what a decimal survives in binary; 0.1 + 0.2 is graded as 0.3, 42.0 as 42, 1e20 digit by digit.
        spellings = f"{number:.15g}", repr(number)
        return tuple(dict.fromkeys((*(f"{Decimal(text):f}" for text in spellings), *spellings)))
    return ()
