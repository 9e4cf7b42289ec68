"""The schema as a flat table of flags: name, section, type, default and documentation of every field.

Read by the parser, the recipe reader, `--help`, the dry run and the generated docs. Field names are unique over all
sections, which is what lets flags be flat.
"""

import ast
import functools
import inspect
import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from rlkit.config.schema import RunConfig

PASS_THROUGH = "sglang"
"""Field of `EngineConfig` that is filled by `--sglang-NAME`, not by a flag of its own name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldInfo:
    """One field of the schema."""

    name: str
    section: str
    hint: Any
    """Type annotation, e.g. `int | None`, `tuple[str, ...]`, `Literal["auto", "cpu"]`."""
    default: Any
    doc: str

    @property
    def flag(self) -> str:
        return flag_of(self.name)

    @property
    def is_optional(self) -> bool:
        return type(None) in get_args(self.hint)

    @property
    def inner(self) -> Any:
        """The annotation without `| None`."""
        rest = [arg for arg in get_args(self.hint) if arg is not type(None)]
        return rest[0] if self.is_optional else self.hint

    @property
    def is_list(self) -> bool:
        return get_origin(self.hint) is tuple

    @property
    def choices(self) -> tuple[str, ...]:
        return get_args(self.inner) if get_origin(self.inner) is Literal else ()


def flag_of(name: str) -> str:
    """`rollout_batch_size` -> `--rollout-batch-size`."""
    return "--" + name.replace("_", "-")


@functools.cache
def sections() -> Mapping[str, type]:
    """Section name -> its dataclass, in the order of `RunConfig`."""
    return types.MappingProxyType(get_type_hints(RunConfig))


@functools.cache
def all_fields() -> Mapping[str, FieldInfo]:
    """Field name -> its description, in the order of the schema, without the SGLang pass-through."""
    table: dict[str, FieldInfo] = {}
    docs = _field_docs()
    for section, cls in sections().items():
        hints = get_type_hints(cls)
        for item in fields(cls):
            if item.name == PASS_THROUGH:
                continue
            assert item.name not in table, f"two sections have a field {item.name}: flags are flat"
            table[item.name] = FieldInfo(
                name=item.name,
                section=section,
                hint=hints[item.name],
                default=_default(item),
                doc=docs[cls.__name__, item.name],
            )
    return types.MappingProxyType(table)


def section_doc(section: str) -> str:
    """The sentence under the section's dataclass."""
    return inspect.getdoc(sections()[section]) or ""


def type_name(hint: Any) -> str:
    """How a type is written in docs and messages: `int`, `float or None`, `auto | cuda | cpu`, `list of str`."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " | ".join(args)
    if origin in (Union, types.UnionType):
        return " or ".join("None" if arg is type(None) else type_name(arg) for arg in args)
    if origin is tuple:
        return f"list of {type_name(args[0])}"
    if origin is dict:
        return "JSON object"
    return "flag" if hint is bool else hint.__name__


def _default(item: Field[Any]) -> Any:
    if item.default_factory is not MISSING:
        return item.default_factory()
    assert item.default is not MISSING, f"{item.name} has no default: required fields are rules, aware of debug modes"
    return item.default


def _field_docs() -> Mapping[tuple[str, str], str]:
    """(class, field) -> the string under the field, which Python itself throws away."""
    docs: dict[tuple[str, str], str] = {}
    for cls in sections().values():
        (node,) = ast.parse(inspect.getsource(cls)).body
        assert isinstance(node, ast.ClassDef)
        for statement, following in zip(node.body, node.body[1:], strict=False):
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                docs[node.name, statement.target.id] = " ".join(str(following.value.value).split())
    return docs
