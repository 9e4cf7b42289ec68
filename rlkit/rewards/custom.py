"""A user's reward function: found by its path, checked before the run starts, its result made plain. Called inside
grader processes.
"""

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from rlkit.types.errors import ConfigError

_FORM = "--custom-rm-path takes `package.module.function` or `file.py:function`"
_SIGNATURE = "(response: str, label, metadata: dict) -> float | dict | None, plain or async"


def load_custom_function(path: str) -> Callable[..., Any]:
    """The function behind `--custom-rm-path`; ConfigError with the path and the remedy when it cannot be used."""
    if ".py:" in path or path.endswith(".py"):
        file, _, name = path.rpartition(":")
        if not name.isidentifier() or not file.endswith(".py"):
            raise ConfigError(f"cannot read {path!r}: {_FORM}")
        module = _load_file(path, Path(file))
    else:
        module_name, _, name = path.rpartition(".")
        if not module_name or not name.isidentifier():
            raise ConfigError(f"cannot read {path!r}: {_FORM}")
        module = _import_module(path, module_name)
    function = module.__dict__.get(name)
    if function is None:
        known = [key for key, value in module.__dict__.items() if callable(value) and not key.startswith("_")]
        raise ConfigError(
            f"--custom-rm-path {path}: {module.__name__} has no {name!r}; it has {', '.join(known) or 'no functions'}"
        )
    if not callable(function):
        raise ConfigError(
            f"--custom-rm-path {path}: {name} is a {type(function).__name__}, not a function {_SIGNATURE}"
        )
    _check_arguments(path, function)
    return function


def is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


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


def _import_module(path: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise ConfigError(
                f"--custom-rm-path {path}: no module {error.name!r}; "
                "put its folder on PYTHONPATH, or use `file.py:function`"
            ) from error
        raise ConfigError(f"--custom-rm-path {path}: importing {name} failed\n{traceback.format_exc()}") from error
    except BaseException as error:  # a module may raise anything, SystemExit included; all of it is the user's to mend
        raise ConfigError(f"--custom-rm-path {path}: importing {name} failed\n{traceback.format_exc()}") from error


def _load_file(path: str, file: Path) -> ModuleType:
    if not file.is_file():
        raise ConfigError(f"--custom-rm-path {path}: there is no file {file.resolve()}")
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # the file may import its neighbours
    spec = importlib.util.spec_from_file_location(file.stem, file.resolve())
    assert spec is not None and spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:  # as above
        raise ConfigError(f"--custom-rm-path {path}: running {file} failed\n{traceback.format_exc()}") from error
    return module


def _check_arguments(path: str, function: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C do not say
        return
    try:
        signature.bind("", None, {})
    except TypeError as error:
        raise ConfigError(
            f"--custom-rm-path {path}: cannot be called with three arguments ({error}); "
            f"its signature is {signature}, wanted is {_SIGNATURE}"
        ) from error
