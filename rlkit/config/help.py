"""`--help`: the schema, section by section, laid out by tyro."""

# tyro leaves the parameters of its generic types open.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

import os
import shutil
import sys
import textwrap
from typing import Any

import tyro
from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from rlkit.config.fields import all_fields, sections
from rlkit.config.schema import RunConfig
from rlkit.config.sglang_flags import sglang_table

_NOTES = (
    "Flags beat recipe files (--config FILE.toml; several are allowed, the last one wins), which beat defaults.",
    "--flag=value and underscores work too. --no-FLAG switches a switch off or empties a list; the value None unsets a"
    " flag that may be unset. A flag given twice: the last one counts.",
    "Every flag of SGLang {version} can be passed on as --sglang-NAME.",
    "--dry-run shows what a run would do, on any machine.",
)


def print_help() -> None:
    """Print all flags with types, defaults and documentation, then the notes."""
    try:
        _print_flags()
        width = min(shutil.get_terminal_size().columns, 120)
        for note in _NOTES:
            print(textwrap.fill(note.format(version=sglang_table().version), width=width))
        sys.stdout.flush()
    except BrokenPipeError:  # `--help | head`: nobody reads the rest, and Python would complain again when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_flags() -> None:
    try:
        tyro.cli(
            RunConfig,
            prog="train.py",
            description="Train a language model by reinforcement learning.",
            args=["--help"],
            config=(OmitArgPrefixes, FlagCreatePairsOff),
            registry=_registry(),
        )
    except SystemExit:
        return


def _registry() -> ConstructorRegistry:
    registry = ConstructorRegistry()

    @registry.struct_rule
    def _section(info: StructTypeInfo) -> StructConstructorSpec | None:  # pyright: ignore[reportUnusedFunction]
        """The documentation is read once for all fields, and the pass-through is no flag of its own."""
        names = [section for section, cls in sections().items() if cls is info.type]
        if not names:
            return None
        fields = tuple(
            StructFieldSpec(name=field.name, type=field.hint, default=field.default, helptext=field.doc)
            for field in all_fields().values()
            if field.section == names[0]
        )
        return StructConstructorSpec(instantiate=info.type, fields=fields)

    @registry.primitive_rule
    def _json(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:  # pyright: ignore[reportUnusedFunction]
        if info.type_origin is not dict:
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="JSON",
            instance_from_str=lambda words: words[0],
            is_instance=lambda value: isinstance(value, dict),
            str_from_instance=lambda value: [str(value)],
        )

    return registry
