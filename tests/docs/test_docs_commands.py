"""Commands in the documentation name what exists: flags, subcommands, scripts and tools."""

import argparse
import importlib
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlkit.cli.main import COMMANDS
from rlkit.config.argv import read_command_line

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docker").glob("*.md"))]
BLOCK = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
VARIABLE = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*=")
PROGRAMS = ("train.py", "train_async.py")


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command line of a page, without variables in front."""

    page: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.words)[:60]}"


def commands_of(page: str, text: str) -> Iterator[Command]:
    for block in BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and VARIABLE.match(words[0]):
                words = words[1:]
            if words and "..." not in words:
                yield Command(page=page, words=tuple(words))


COMMANDS_IN_DOCS = [command for path in PAGES for command in commands_of(path.name, path.read_text())]


def flags_of(words: tuple[str, ...]) -> list[str]:
    """The flags of `train.py` in a command that starts it or hands them on; empty for every other command."""
    for place, word in enumerate(words):
        is_recipe = word.startswith("scripts/run-") and word.endswith(".sh")
        if Path(word).name in PROGRAMS or is_recipe or (word == "doctor" and words[place - 1] == "rlkit"):
            return list(words[place + 1 :])
    return []


def problems_of(command: Command) -> list[str]:
    """What the command names that is not there."""
    found = [
        f"there is no {word}"
        for word in command.words
        if re.fullmatch(r"(scripts|tools|tests)/[\w./-]+\.(sh|py|sbatch)|train\w*\.py", word)
        and not (ROOT / word).is_file()
    ]
    found += read_command_line(flags_of(command.words)).problems
    if command.words[0] == "rlkit" and command.words[1] != "doctor":
        found += _rlkit_problems(command.words[1:])
    return found


def _rlkit_problems(words: tuple[str, ...]) -> list[str]:
    if words[0] not in COMMANDS:
        return [f"rlkit has no command {words[0]}"]
    parser = argparse.ArgumentParser(exit_on_error=False)
    importlib.import_module(COMMANDS[words[0]][0]).add_arguments(parser)
    try:
        parser.parse_args(words[1:])
    except (argparse.ArgumentError, SystemExit) as error:
        return [f"rlkit {words[0]}: {error}"]
    return []


@pytest.mark.parametrize("command", COMMANDS_IN_DOCS, ids=str)
def test_command_names_what_exists(command: Command):
    assert problems_of(command) == []


def test_commands_are_found():
    assert sum(bool(flags_of(command.words)) for command in COMMANDS_IN_DOCS) >= 6
    assert {"README.md", "quick_start.md", "operation.md"} <= {command.page for command in COMMANDS_IN_DOCS}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("SEED=1 python train.py --lr 1e-6 \\\n  --rolout-batch-size 8", "did you mean --rollout-batch-size"),
        ("bash scripts/run-nothing.sh --lr 1e-6", "there is no scripts/run-nothing.sh"),
        ("bash scripts/run-qwen3-4B-fsdp.sh --lr fast", "expected a number"),
        ("rlkit doctor --hf-checkpint x", "did you mean --hf-checkpoint"),
        ("rlkit repair x", "rlkit has no command repair"),
        ("rlkit ckpt verify", "rlkit ckpt: "),
        ("python tools/nothing.py", "there is no tools/nothing.py"),
    ],
)
def test_what_is_wrong_is_found(line: str, problem: str):
    (command,) = commands_of("x.md", f"```bash\n{line}\n```\n")
    assert any(problem in found for found in problems_of(command)), problems_of(command)
