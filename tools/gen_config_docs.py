"""Write `docs/configuration.md` from the schema. A test compares the file with what this prints.

python tools/gen_config_docs.py [--check]
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from rlkit.config.fields import FieldInfo, all_fields, flag_of, section_doc, sections, type_name
from rlkit.config.rules import ADVICE, CROSS_RULES, Rule
from rlkit.config.sglang_flags import OWNED, PREFIX, sglang_table
from rlkit.config.slime_flags import SLIME_ONLY

OUTPUT = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"

INTRODUCTION = """\
# Configuration

Generated from `rlkit/config/schema/` by `python tools/gen_config_docs.py`; edit the schema, not this file.

```bash
python train.py --config recipe.toml --rollout-batch-size 32 --colocate --dry-run
```

- **Who wins**: flags beat recipe files, later recipe files beat earlier ones, all beat defaults. A flag given twice:
  the last one counts, so `bash scripts/run-X.sh --lr 2e-6` overrides the script.
- **Spelling**: `--flag value` and `--flag=value`; underscores work for dashes; no abbreviations.
- **Switches** stand alone (`--colocate`); `--no-colocate` switches off. `--no-FLAG` also empties a list.
- **Lists** take several words: `--rollout-stop A B`. A value that begins with two dashes: `--rollout-stop=--end`.
- **JSON**: `--apply-chat-template-kwargs '{"enable_thinking": false}'`.
- **`None`** unsets a flag whose default is unset.
- **Errors**: unknown flags, unreadable values and impossible combinations are reported together, before anything
  starts.
- `--dry-run` prints the resolved configuration with the origin of every value, the layout and the batch arithmetic. It
  needs neither GPU nor Ray nor the model. A run writes the same into `config.json` of its run folder.

## Recipe files

TOML. Keys are called like the flags, with underscores or dashes, flat or in a table called like the section below.
SGLang's own flags go under `[sglang]`.

```toml
rollout_batch_size = 32
n-samples-per-prompt = 8

[optimizer]
lr = 2e-6

[evaluation]
eval_interval = 20
eval_prompt_data = ["gsm8k", "data/gsm8k/test.jsonl"]

[sglang]
mem_fraction_static = 0.7
```
"""


def render() -> str:
    """The whole document."""
    return "\n".join([INTRODUCTION, *_flag_tables(), *_rule_part(), *_sglang_part(), *_slime_part()])


def _flag_tables() -> Iterator[str]:
    for section in sections():
        yield f"## `[{section}]`\n\n{section_doc(section)}\n\n| flag | type | default | |\n|---|---|---|---|"
        yield from (_row(field) for field in all_fields().values() if field.section == section)
        yield ""


def _row(field: FieldInfo) -> str:
    type_cell = type_name(field.inner)
    cells = [f"`{field.flag}`", type_cell, _default(field), field.doc]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(field: FieldInfo) -> str:
    if field.default in (None, "", (), {}):
        return ""
    shown = field.default if isinstance(field.default, str) else json.dumps(field.default)
    return "off" if shown == "false" else "on" if shown == "true" else f"`{shown}`"


def _rule_part() -> Iterator[str]:
    yield (
        "## What is checked\n\nBesides the range of every number, each of these rules is a function in"
        " `rlkit/config/rules/` whose message holds the values and the\nremedy; a combination that breaks one is"
        " refused before anything starts:\n"
    )
    yield ", ".join(_words(rule) for rule in CROSS_RULES) + ".\n"
    yield "These only advise:\n"
    yield ", ".join(_words(rule) for rule in ADVICE) + ".\n"


def _words(rule: Rule) -> str:
    return rule.__name__.replace("_", " ")


def _sglang_part() -> Iterator[str]:
    table = sglang_table()
    yield (
        f"## `--sglang-*`\n\nEvery flag of SGLang {table.version} is passed on as `--sglang-NAME VALUE` and checked"
        " against its name, type and choices\n(`rlkit/config/sglang_flags.json`, written by"
        " `tools/gen_sglang_flags.py`). `--sglang-server-concurrency` is rlkit's own.\n"
        "These are refused, because rlkit sets them or relies on them:\n"
    )
    yield "| flag | instead |\n|---|---|"
    yield from (f"| `{flag_of(PREFIX + name)}` | {reason} |" for name, reason in OWNED.items())
    yield ""


def _slime_part() -> Iterator[str]:
    yield "## Flags of slime scripts that have no place here\n\n| flag | instead |\n|---|---|"
    yield from (f"| `{flag_of(name)}` | {reason} |" for name, reason in SLIME_ONLY.items())
    yield ""


def main() -> int:
    options = argparse.ArgumentParser(description="Write docs/configuration.md from the schema.")
    options.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the file is out of date")
    if options.parse_args().check:
        return 0 if OUTPUT.read_text(encoding="utf-8") == render() else 1
    OUTPUT.write_text(render(), encoding="utf-8")
    print(OUTPUT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
