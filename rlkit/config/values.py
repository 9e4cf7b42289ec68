"""From what a person wrote to a typed value: words of a command line, or values of a TOML file.

tyro knows how each annotation of the schema is written on a command line; the same specifications feed `--help`
(`config/help.py`). Every function here raises `ValueError` with what was expected; the caller adds flag,
value and file.
"""

# tyro leaves the parameters of its generic types open.
# pyright: reportUnknownMemberType=false

import difflib
import functools
import json
from collections.abc import Iterable, Sequence
from typing import Any, cast, get_args, get_origin

from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from rlkit.config.fields import FieldInfo, type_name

_EXPECTED = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate that `word` was probably meant to be, if any comes close."""
    close = difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.6)
    return close[0] if close else None


def expected(hint: Any) -> str:
    """What an annotation wants, for the end of an error message."""
    origin = get_origin(hint)
    if origin is tuple:
        return f"a list, each {expected(get_args(hint)[0])}"
    if origin is dict:
        return "a JSON object"
    return _EXPECTED.get(hint, type_name(hint))


def from_words(field: FieldInfo, words: Sequence[str]) -> Any:
    """Value of a flag that takes one word, or several where the field is a list. Raises ValueError."""
    if field.is_optional and list(words) == ["None"]:
        return None
    if field.choices:
        return _choice(words[0], field.choices)
    if get_origin(field.inner) is dict:
        return json_object(words[0])
    try:
        return _spec(field.inner).instance_from_str(list(words))
    except ValueError:
        raise ValueError(f"expected {expected(field.inner)}") from None


def from_toml(field: FieldInfo, value: Any) -> Any:
    """The same from a TOML value, which has a type of its own already. Raises ValueError."""
    if field.choices:
        if not isinstance(value, str):
            raise ValueError(f"expected one of {', '.join(field.choices)}")
        return _choice(value, field.choices)
    return _typed(field.inner, value)


def json_object(text: str) -> dict[str, Any]:
    """A JSON object from one word. Raises ValueError naming the place where the JSON breaks."""
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"expected a JSON object ({error.msg} at character {error.pos})") from None
    if not isinstance(parsed, dict):
        raise ValueError("expected a JSON object")
    return cast("dict[str, Any]", parsed)


def _choice(word: str, choices: Sequence[str]) -> str:
    if word in choices:
        return word
    close = nearest(word, choices)
    hint = f"; did you mean {close}?" if close else ""
    raise ValueError(f"expected one of {', '.join(choices)}{hint}")


def _typed(hint: Any, value: Any) -> Any:
    origin = get_origin(hint)
    if origin is tuple and isinstance(value, list):
        item_hint = get_args(hint)[0]
        try:
            return tuple(_typed(item_hint, item) for item in cast("list[Any]", value))
        except ValueError:
            raise ValueError(f"expected {expected(hint)}") from None
    if origin is dict and isinstance(value, dict):
        return cast("dict[str, Any]", value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if origin is None and type(value) is hint:  # exact: a TOML boolean is not an integer
        return value
    raise ValueError(f"expected {expected(hint)}")


@functools.cache
def _spec(hint: Any) -> PrimitiveConstructorSpec[Any]:
    info = PrimitiveTypeInfo.make(hint, set())
    spec = cast("Any", ConstructorRegistry.get_primitive_spec(info))
    assert isinstance(spec, PrimitiveConstructorSpec), f"tyro cannot read {hint} from a command line"
    return cast("PrimitiveConstructorSpec[Any]", spec)
