"""A recipe file: TOML keys called like the flags, flat or grouped in tables called like the sections.

    rollout_batch_size = 32            # or "rollout-batch-size"
    [optimizer]
    lr = 2e-6
    [sglang]                           # SGLang's own flags
    mem_fraction_static = 0.7

A key in the table of another section, an unknown key and a key given twice are problems that name the file.
"""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from rlkit.config.fields import PASS_THROUGH, FieldInfo, sections
from rlkit.config.flags import Flag, find, why_unknown
from rlkit.config.sglang_flags import PREFIX


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What one file says, typed."""

    path: str
    is_readable: bool = True
    values: dict[str, Any] = field(default_factory=dict[str, Any])
    bad_keys: set[str] = field(default_factory=set[str])
    problems: list[str] = field(default_factory=list[str])


def read_recipe(path: str) -> Recipe:
    """Read one file; all problems are collected, none is raised."""
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Recipe(path=path, is_readable=False, problems=[f"--config {path}: there is no such file"])
    except tomllib.TOMLDecodeError as error:
        return Recipe(path=path, is_readable=False, problems=[f"--config {path}: not a TOML file: {error}"])
    except (OSError, UnicodeDecodeError) as error:
        return Recipe(path=path, is_readable=False, problems=[f"--config {path}: cannot be read: {error}"])
    recipe = Recipe(path=path)
    _read_table(recipe, table)
    return recipe


def _read_table(recipe: Recipe, table: Mapping[str, Any]) -> None:
    for key, value in table.items():
        name = key.replace("-", "_")
        if name == PASS_THROUGH and isinstance(value, dict):
            _read_sglang(recipe, cast("dict[str, Any]", value))
        elif name in sections() and isinstance(value, dict):
            _read_section(recipe, name, cast("dict[str, Any]", value))
        else:
            _read_key(recipe, name, value, where=key)


def _read_section(recipe: Recipe, section: str, table: Mapping[str, Any]) -> None:
    for key, value in table.items():
        name = key.replace("-", "_")
        where = f"[{section}] {key}"
        if section == "engine" and name == PASS_THROUGH and isinstance(value, dict):
            _read_sglang(recipe, cast("dict[str, Any]", value))
            continue
        flag = find(name)
        home = flag.source.section if flag is not None and isinstance(flag.source, FieldInfo) else "engine"
        if flag is not None and home != section:
            recipe.problems.append(f"{recipe.path}: {where} belongs to the table [{home}]")
            recipe.bad_keys.add(flag.key)
        else:
            _read_key(recipe, name, value, where=where)


def _read_sglang(recipe: Recipe, table: Mapping[str, Any]) -> None:
    for key, value in table.items():
        _read_key(recipe, PREFIX + key.replace("-", "_"), value, where=f"[sglang] {key}")


def _read_key(recipe: Recipe, name: str, value: Any, *, where: str) -> None:
    flag = find(name)
    if flag is None:
        extra = [] if name.startswith(PREFIX) else [*sections(), PASS_THROUGH]
        recipe.problems.append(f"{recipe.path}: {where}: {why_unknown(name, noun='key', extra=extra)}")
        return
    if flag.key in recipe.values or flag.key in recipe.bad_keys:
        recipe.problems.append(f"{recipe.path}: {where} is given twice in this file")
        return
    _set(recipe, flag, value, where=where)


def _set(recipe: Recipe, flag: Flag, value: Any, *, where: str) -> None:
    try:
        recipe.values[flag.key] = flag.from_toml(value)
    except ValueError as error:
        shown = json.dumps(value, default=str)
        recipe.problems.append(f"{recipe.path}: {where} = {shown}: {error}")
        recipe.bad_keys.add(flag.key)
