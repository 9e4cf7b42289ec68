"""Write `rlkit/config/sglang_flags.json`: every command-line flag of the installed SGLang, as data.

Run it in an environment that has the pinned SGLang (on a machine without a GPU its kernel package needs a stub of
libcuda, see docs/CONTRIBUTING.md). rlkit itself never imports SGLang: recipes are checked where it is not installed.

    python tools/gen_sglang_flags.py [--output FILE]
"""

import argparse
import importlib
import importlib.metadata
import json
from pathlib import Path
from typing import Any

OUTPUT = Path(__file__).resolve().parents[1] / "rlkit" / "config" / "sglang_flags.json"

KINDS = {
    "int": "int",
    "float": "float",
    "str": "str",
    "nullable_str": "str",
    "human_readable_int": "size",
    "loads": "json",
    "parse_cuda_graph_config_arg": "json_object",
    "json_list_type": "json_list",
}
"""Name of the argparse `type` function -> kind of value in the table."""

SWITCHES = {"_StoreTrueAction", "DeprecatedStoreTrueAction", "DeprecatedStoreConstAction"}


def describe(action: argparse.Action) -> dict[str, Any]:
    """One flag as the table holds it."""
    action_name = type(action).__name__
    if action_name in SWITCHES:
        return {"kind": "switch"}
    if action_name == "BooleanOptionalAction":
        return {"kind": "toggle"}
    type_name = getattr(action.type, "__name__", "str")
    entry: dict[str, Any] = {"kind": KINDS[type_name]}  # KeyError: a new type function, give it a kind
    if action.nargs is not None:
        entry["nargs"] = action.nargs
    if action.choices is not None:
        values = list(action.choices)
        entry["choices"] = sorted(values) if isinstance(action.choices, set) else values
    return entry


def build_table(actions: list[argparse.Action], version: str) -> dict[str, Any]:
    """All flags, other spellings -> the name, and the flags that SGLang still accepts but ignores."""
    names = {option[2:].replace("-", "_") for action in actions for option in action.option_strings}
    flags: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    ignored: list[str] = []
    for action in actions:
        spellings = [option[2:].replace("-", "_") for option in action.option_strings if not option.startswith("--no-")]
        if type(action).__name__ == "DeprecatedAction":
            ignored += spellings
        elif type(action).__name__ == "DeprecatedAliasStoreAction" and action.dest in names - set(spellings):
            aliases |= dict.fromkeys(spellings, action.dest)
        else:
            name = action.dest if action.dest in spellings else spellings[0]
            flags[name] = describe(action)
            aliases |= {spelling: name for spelling in spellings if spelling != name}
    return {
        "sglang": version,
        "flags": dict(sorted(flags.items())),
        "aliases": dict(sorted(aliases.items())),
        "ignored": sorted(ignored),
    }


def render(table: dict[str, Any]) -> str:
    """JSON with one flag a line, so that a new SGLang shows as a readable diff."""
    lines = [f'  "{name}": {json.dumps(entry)}' for name, entry in table["flags"].items()]
    flags = "{\n" + ",\n".join(lines) + "\n}"
    aliases = json.dumps(table["aliases"], indent=1)
    return (
        f'{{\n"sglang": {json.dumps(table["sglang"])},\n"flags": {flags},\n'
        f'"aliases": {aliases},\n"ignored": {json.dumps(table["ignored"])}\n}}\n'
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--output", type=Path, default=OUTPUT)
    output = options.parse_args().output

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    importlib.import_module("sglang.srt.server_args").ServerArgs.add_cli_args(parser)
    table = build_table(parser._actions, importlib.metadata.version("sglang"))
    output.write_text(render(table), encoding="utf-8")
    print(f"{output}: {len(table['flags'])} flags of SGLang {table['sglang']}, {len(table['aliases'])} other spellings")


if __name__ == "__main__":
    main()
