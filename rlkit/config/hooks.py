"""Functions of the user that flags name by path: which there are, how each is called, and how it is found.

`package.module.function` or `file.py:function`. `check_source` reads a file without running it, before anything is
launched; `load_function` imports, in the process that will call the function. Both errors show the right signature.
"""

import ast
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from rlkit.config.errors import ConfigError

_FORM = "takes `package.module.function` or `file.py:function`"
_FILE_FUNCTION = re.compile(r".+\.py:[^\W\d]\w*")
_DOTTED_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Hook:
    """One place where a run calls a function of the user."""

    field: str
    """Field of the schema; its flag names the function."""
    signature: str
    """As an error message shows it."""
    num_arguments: int
    """Positional arguments of a call."""
    must_be_async: bool = False
    built_in: tuple[str, ...] = ()
    """Short names that stand for functions of rlkit."""

    @property
    def flag(self) -> str:
        return "--" + self.field.replace("_", "-")


HOOKS: Mapping[str, Hook] = MappingProxyType(
    {
        hook.field: hook
        for hook in (
            Hook(
                field="custom_rm_path",
                signature="(response: str, label, metadata: dict) -> float | dict | None, plain or async; "
                "with --group-rm (responses: list[str], label, metadata: dict) -> list",
                num_arguments=3,
            ),
            Hook(
                field="custom_reward_post_process_path",
                signature="(groups: list[SampleGroup]) -> list[list[float | None]]",
                num_arguments=1,
            ),
            Hook(
                field="dynamic_sampling_filter_path",
                signature="(group: SampleGroup) -> bool | FilterVerdict",
                num_arguments=1,
                built_in=("check_reward_nonzero_std", "check_reward_nonzero_std_with_fallback"),
            ),
            Hook(
                field="buffer_filter_path",
                signature="(waiting: list[WaitingGroup], num_groups: int, step: int) -> list[WaitingGroup]",
                num_arguments=3,
                built_in=("pop_first",),
            ),
            Hook(
                field="rollout_sample_filter_path",
                signature="(groups: list[SampleGroup]) -> Iterable[Sample]",
                num_arguments=1,
            ),
            Hook(
                field="rollout_all_samples_process_path",
                signature="(groups: list[SampleGroup], step: int) -> None",
                num_arguments=2,
            ),
            Hook(
                field="custom_generate_function_path",
                signature="async (turns: Turns, sample: Sample, sampling: SamplingParams) -> None | list[Sample]",
                num_arguments=3,
                must_be_async=True,
            ),
            Hook(
                field="custom_agent_path",
                signature="(base_url: str, api_key: str, task: dict) -> float | None, plain or async",
                num_arguments=3,
            ),
            Hook(
                field="rollout_function_path",
                signature="async (job: RolloutJob) -> list[SampleGroup]",
                num_arguments=1,
                must_be_async=True,
            ),
        )
    }
)
"""Field of the schema -> its hook. `docs/hooks.md` shows an example of each."""


def has_path_form(hook: Hook, path: str) -> bool:
    """Whether the text could name a function: a short name, a file with a function, or a dotted path."""
    if path in hook.built_in or _FILE_FUNCTION.fullmatch(path):
        return True
    return ".py" not in path and _DOTTED_FUNCTION.fullmatch(path) is not None


def check_source(hook: Hook, path: str) -> str | None:
    """What is wrong with `file.py:function`, read from its source without running it; None where nothing is, or where
    only an import can tell.
    """
    file, _, name = path.rpartition(":")
    if path in hook.built_in or not file.endswith(".py"):
        return None
    if not Path(file).is_file():
        return f"{hook.field} = {path}: there is no file {file}; correct {hook.flag}"
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"), filename=file)
    except (SyntaxError, UnicodeDecodeError) as error:
        return f"{hook.field} = {path}: {file} is not Python: {error}; correct it, or {hook.flag}"
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    found = [node for node in functions if node.name == name]
    if not found:
        if _may_bind(tree, name) or not functions:
            return None
        told = ", ".join(node.name for node in functions)
        return f"{hook.field} = {path}: {file} has no {name!r}, it has {told}; correct {hook.flag}"
    node = found[-1]
    if node.decorator_list:
        return None
    shown = f"{hook.field} = {path}: {hook.flag} wants {hook.signature}"
    if not _takes(node.args, hook.num_arguments):
        return f"{shown}; line {node.lineno} has ({ast.unparse(node.args)})"
    if hook.must_be_async and isinstance(node, ast.FunctionDef):
        return f"{shown}; line {node.lineno} is a plain function, write `async def {name}`"
    return None


def _may_bind(tree: ast.Module, name: str) -> bool:
    """Whether something other than a `def` at the top of the file could make the name: only an import can tell."""
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            bound = {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            if name in bound or "*" in bound:
                return True
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.ClassDef):
            if any(isinstance(part, ast.Name) and part.id == name for part in ast.walk(node)):
                return True
            if isinstance(node, ast.ClassDef) and node.name == name:
                return True
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Expr):
            return True  # an `if`, a `try`, a loop
    return False


def load_function(hook: Hook, path: str) -> Callable[..., Any]:
    """The function itself; a ConfigError with the path, the reason and the right signature when it cannot be used."""
    module, name = _module_of(hook, path)
    function = module.__dict__.get(name)
    if function is None:
        known = [key for key, value in module.__dict__.items() if callable(value) and not key.startswith("_")]
        raise ConfigError(
            f"{hook.flag} {path}: {module.__name__} has no {name!r}; it has {', '.join(known) or 'no functions'}"
        )
    if not callable(function):
        raise ConfigError(f"{hook.flag} {path}: {name} is a {type(function).__name__}, not a function {hook.signature}")
    _check_arguments(hook, path, function)
    return function


def is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _takes(arguments: ast.arguments, count: int) -> bool:
    positional = [*arguments.posonlyargs, *arguments.args]
    least = len(positional) - len(arguments.defaults)
    needs_keyword = any(default is None for default in arguments.kw_defaults)
    return least <= count and (count <= len(positional) or arguments.vararg is not None) and not needs_keyword


def _module_of(hook: Hook, path: str) -> tuple[ModuleType, str]:
    if ".py:" in path or path.endswith(".py"):
        file, _, name = path.rpartition(":")
        if not name.isidentifier() or not file.endswith(".py"):
            raise ConfigError(f"cannot read {path!r}: {hook.flag} {_FORM}")
        return _load_file(hook, path, Path(file)), name
    module_name, _, name = path.rpartition(".")
    if not module_name or not name.isidentifier():
        raise ConfigError(f"cannot read {path!r}: {hook.flag} {_FORM}")
    return _import_module(hook, path, module_name), name


def _import_module(hook: Hook, path: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise ConfigError(
                f"{hook.flag} {path}: no module {error.name!r}; put its folder on PYTHONPATH, or use `file.py:function`"
            ) from error
        raise ConfigError(f"{hook.flag} {path}: importing {name} failed\n{traceback.format_exc()}") from error
    except BaseException as error:  # a module may raise anything, SystemExit included; all of it is the user's to mend
        raise ConfigError(f"{hook.flag} {path}: importing {name} failed\n{traceback.format_exc()}") from error


def _load_file(hook: Hook, path: str, file: Path) -> ModuleType:
    if not file.is_file():
        raise ConfigError(f"{hook.flag} {path}: there is no file {file.resolve()}")
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
        raise ConfigError(f"{hook.flag} {path}: running {file} failed\n{traceback.format_exc()}") from error
    return module


def _check_arguments(hook: Hook, path: str, function: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C do not say
        return
    try:
        signature.bind(*[None] * hook.num_arguments)
    except TypeError as error:
        raise ConfigError(
            f"{hook.flag} {path}: cannot be called with {_number(hook.num_arguments)} ({error}); "
            f"its signature is {signature}, wanted is {hook.signature}"
        ) from error
    if hook.must_be_async and not is_async(function):
        raise ConfigError(f"{hook.flag} {path}: it must be a coroutine function, `async def`: {hook.signature}")


def _number(count: int) -> str:
    return f"{('no', 'one', 'two', 'three')[count]} argument{'s' * (count != 1)}"
