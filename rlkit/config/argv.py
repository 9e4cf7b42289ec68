"""The words of a command line, split into flags and their values. Nothing is dropped: every odd word is a problem.

`--flag value`, `--flag=value`, underscores for dashes, and `--no-flag` for switches and lists. A flag given twice: the
last one counts, so that `bash run.sh --lr 2e-6` overrides the script.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlkit.config.flags import Flag, find, find_negated, why_unknown

_FLAG = re.compile(r"--[A-Za-z]")


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandLine:
    """What a command line says, typed."""

    values: dict[str, Any] = field(default_factory=dict[str, Any])
    """Key of the flag -> value; the last one where a flag is repeated."""
    recipes: list[str] = field(default_factory=list[str])
    """Files of `--config`, in order."""
    bad_keys: set[str] = field(default_factory=set[str])
    """Flags whose value could not be read."""
    problems: list[str] = field(default_factory=list[str])
    wants_help: bool = False


def read_command_line(argv: Sequence[str]) -> CommandLine:
    """Read every word once; all problems are collected, none is raised."""
    values: dict[str, Any] = {}
    recipes: list[str] = []
    bad_keys: set[str] = set()
    problems: list[str] = []
    wants_help = False
    place = 0
    previous = "the program name"
    while place < len(argv):
        word = argv[place]
        if word in ("-h", "--help"):
            wants_help = True
            place += 1
            continue
        if not _FLAG.match(word):
            problems.append(f"unexpected word {word!r} after {previous}")
            place += 1
            continue
        spelled, equals, attached = word.partition("=")
        name = spelled[2:].replace("-", "_")
        following = [attached] if equals else _values_after(argv, place)
        flag = find(name)
        negated = find_negated(name) if flag is None else None
        num_used = len(following)
        if flag is not None:
            num_used = _set(flag, following, values, bad_keys, problems, attached=bool(equals))
        elif negated is not None:
            num_used = 0
            values[negated.key] = negated.emptied
            if equals:
                problems.append(f"{spelled} takes no value, got {attached!r}")
        elif name == "config":
            num_used = min(1, len(following))
            recipes += following[:1]
            if not following:
                problems.append("--config needs a file")
        else:
            problems.append(why_unknown(name, extra=["config", "help"]))
        previous = spelled if not following[:num_used] else f"{spelled} {' '.join(following[:num_used])}"
        place += 1 if equals else 1 + num_used
    return CommandLine(values=values, recipes=recipes, bad_keys=bad_keys, problems=problems, wants_help=wants_help)


def _values_after(argv: Sequence[str], place: int) -> list[str]:
    """The words up to the next flag. A word with one dash, such as -1, is a value."""
    words: list[str] = []
    for word in argv[place + 1 :]:
        if _FLAG.match(word):
            break
        words.append(word)
    return words


def _set(
    flag: Flag, words: list[str], values: dict[str, Any], bad_keys: set[str], problems: list[str], *, attached: bool
) -> int:
    """Read one flag; returns how many of `words` belong to it."""
    if flag.is_unsettable_switch and words[:1] == ["None"]:
        values[flag.key] = None
        bad_keys.discard(flag.key)
        return 1
    match flag.takes:
        case "nothing":
            used: list[str] = []
        case "one" | "at most one":
            used = words[:1]
        case "some" | "any":
            used = words
    if flag.takes == "nothing" and attached:
        remedy = f"write {flag.spelled} or {flag.spelled.replace('--', '--no-', 1)}"
        problems.append(f"{flag.spelled} takes no value, got {words[0]!r}: {remedy}")
        return 0
    if not used and flag.takes in ("one", "some"):
        bad_keys.add(flag.key)
        problems.append(f"{flag.spelled} needs {'a value' if flag.takes == 'one' else 'at least one value'}")
        return 0
    try:
        values[flag.key] = flag.from_words(used)
        bad_keys.discard(flag.key)
    except ValueError as error:
        bad_keys.add(flag.key)
        problems.append(f"{flag.spelled} {' '.join(map(repr, used))}: {error}")
    return len(used)
