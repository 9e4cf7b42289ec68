"""From a command line to a checked `RunConfig`: defaults, then recipe files (`--config x.toml`), then flags.

Called by `train.py` and the tools. Every problem is reported at once, in one `ConfigError`: unknown flags, values that
cannot be read, and rules across fields. Imports neither torch nor ray, so that `--help` is quick.
"""

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

from rlkit.config.argv import read_command_line
from rlkit.config.errors import ConfigError
from rlkit.config.fields import PASS_THROUGH, all_fields, sections
from rlkit.config.recipe import read_recipe
from rlkit.config.rules import check
from rlkit.config.schema import RunConfig
from rlkit.config.sglang_flags import PREFIX
from rlkit.config.values import from_toml

DEFAULT = "default"
COMMAND_LINE = "command line"
PROGRAM_DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType({"train_async.py": {"async_mode": "one-step"}})
"""Program -> fields that it sets where neither a file nor a flag does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedConfig:
    """A configuration, and where each of its values came from."""

    config: RunConfig
    provenance: Mapping[str, str]
    """Field name, or `sglang_NAME` for what is passed through -> `default`, `file x.toml` or `command line`."""


def load_config(argv: Sequence[str], *, program: str = "train.py") -> ResolvedConfig:
    """Resolve the words after the program's name. `--help` prints and exits. Raises ConfigError.

    `program` may have defaults of its own (`PROGRAM_DEFAULTS`).
    """
    line = read_command_line(argv)
    if line.wants_help:
        from rlkit.config.help import print_help  # local: a run does not need tyro's formatter

        print_help()
        raise SystemExit(0)

    values: dict[str, Any] = {}
    provenance: dict[str, str] = dict.fromkeys(all_fields(), DEFAULT)
    problems: list[str] = []
    unreadable: set[str] = set()
    recipes = [read_recipe(path) for path in line.recipes]
    layers: list[tuple[str, Mapping[str, Any], Set[str], Sequence[str]]] = [
        (program, PROGRAM_DEFAULTS.get(program, {}), set(), [])
    ]
    layers += [(f"file {recipe.path}", recipe.values, recipe.bad_keys, recipe.problems) for recipe in recipes]
    layers.append((COMMAND_LINE, line.values, line.bad_keys, line.problems))
    for origin, new_values, bad_keys, new_problems in layers:
        values |= new_values
        provenance |= dict.fromkeys(new_values, origin)
        unreadable = (unreadable - new_values.keys()) | bad_keys
        problems += new_problems

    config = _build(values)
    if all(recipe.is_readable for recipe in recipes):  # without its recipe, half the run would seem to be missing
        problems += check(config, unreadable=frozenset(unreadable))
    if problems:
        raise ConfigError(_one_message(problems))
    return ResolvedConfig(config=config, provenance=MappingProxyType(provenance))


def to_json(resolved: ResolvedConfig) -> dict[str, Any]:
    """Section -> field -> `{"value": ..., "from": ...}`, ready for `json.dumps`. `from_json` reads it back."""
    document: dict[str, Any] = {section: {} for section in sections()}
    for name, field in all_fields().items():
        value = getattr(getattr(resolved.config, field.section), name)
        document[field.section][name] = {"value": _plain(value), "from": resolved.provenance[name]}
    document["engine"][PASS_THROUGH] = {
        name: {"value": _plain(value), "from": resolved.provenance[PREFIX + name]}
        for name, value in resolved.config.engine.sglang.items()
    }
    return document


def from_json(document: Mapping[str, Any]) -> RunConfig:
    """The `RunConfig` of a `to_json` document. A field that the document lacks has its default: it may be older.

    Raises ConfigError for names that the schema does not have and values of a wrong type.
    """
    values: dict[str, Any] = {}
    problems: list[str] = []
    for section, entries in document.items():
        for name, entry in cast("Mapping[str, Any]", entries).items():
            if section == "engine" and name == PASS_THROUGH:
                values |= {PREFIX + passed: item["value"] for passed, item in entry.items()}
                continue
            field = all_fields().get(name)
            if field is None or field.section != section:
                problems.append(f"{section}.{name} is no field of this version of rlkit")
                continue
            try:
                values[name] = None if entry["value"] is None else from_toml(field, entry["value"])
            except ValueError as error:
                problems.append(f"{section}.{name} = {json.dumps(entry['value'])}: {error}")
    if problems:
        raise ConfigError(_one_message(problems))
    return _build(values)


def _build(values: Mapping[str, Any]) -> RunConfig:
    """Sections from flat values; what is not given has its default."""
    parts: dict[str, dict[str, Any]] = {section: {} for section in sections()}
    for key, value in values.items():
        if key in all_fields():
            parts[all_fields()[key].section][key] = value
    parts["engine"][PASS_THROUGH] = {
        key.removeprefix(PREFIX): value for key, value in values.items() if key not in all_fields()
    }
    return RunConfig(**{section: cls(**parts[section]) for section, cls in sections().items()})


def _one_message(problems: Sequence[str]) -> str:
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return "\n".join([f"{count} in the configuration:", *(f"  - {problem}" for problem in problems)])


def _plain(value: Any) -> Any:
    """JSON has no tuples."""
    return list(cast("tuple[Any, ...]", value)) if isinstance(value, tuple) else value
