"""A user's reward function: found by its path, checked before the run starts, its result made plain. Called inside
grader processes.
"""

from collections.abc import Callable, Mapping
from typing import Any

from rlkit.config.hooks import HOOKS, is_async, load_function

__all__ = ["is_async", "load_custom_function", "plain_value"]


def load_custom_function(path: str) -> Callable[..., Any]:
    """The function behind `--custom-rm-path`; ConfigError with the path and the remedy when it cannot be used."""
    return load_function(HOOKS["custom_rm_path"], path)


def plain_value(value: Any) -> Any:
    """The result with numbers and containers of every library turned into Python's own, so that it can be sent and
    written as JSON.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain_value(item) for item in value]
    try:
        return float(value)  # numpy scalars, tensors of one element, Decimal
    except (TypeError, ValueError, RuntimeError):
        return repr(value)
