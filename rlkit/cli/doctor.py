"""`rlkit doctor [flags of train.py]`: would a run start here? Each check says what it found, and what to do.

The flags are those of the run in question, as many as there are; with `--hf-checkpoint` the model's files, its
tokenizer and an engine that serves it are tried as well. Nothing is left behind.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from rlkit.config.argv import read_command_line
from rlkit.config.errors import ConfigError
from rlkit.config.fields import PASS_THROUGH, all_fields, sections
from rlkit.config.load import load_config
from rlkit.config.recipe import read_recipe
from rlkit.config.rules import check_paths
from rlkit.config.schema import RunConfig
from rlkit.config.sglang_flags import PREFIX


class Status(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "FAILED"
    SKIPPED = "skipped"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What one check found."""

    status: Status
    found: str
    remedy: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One question about the machine, the model or the engines."""

    name: str
    ask: Callable[[RunConfig], Outcome]


def ok(found: str) -> Outcome:
    return Outcome(status=Status.OK, found=found)


def warning(found: str, remedy: str) -> Outcome:
    return Outcome(status=Status.WARNING, found=found, remedy=remedy)


def failed(found: str, remedy: str) -> Outcome:
    return Outcome(status=Status.FAILED, found=found, remedy=remedy)


def skipped(found: str) -> Outcome:
    return Outcome(status=Status.SKIPPED, found=found)


def run_doctor(argv: Sequence[str]) -> int:
    """0 when nothing failed, 1 otherwise. Prints a line for each check as soon as it and those before it are known."""
    from rlkit.cli.doctor_checks import CHECKS  # local: it imports this module

    began = time.monotonic()
    cfg, problems = read_flags(argv)
    outcomes = {"flags": flag_outcome(argv, problems)}
    show("flags", outcomes["flags"])
    with ThreadPoolExecutor(max_workers=3, thread_name_prefix="doctor") as pool:
        futures: Mapping[str, Future[Outcome]] = {item.name: pool.submit(item.ask, cfg) for item in CHECKS}
        for name, future in futures.items():
            outcomes[name] = future.result()
            show(name, outcomes[name])
    bad = [name for name, outcome in outcomes.items() if outcome.status is Status.FAILED]
    seconds = time.monotonic() - began
    verdict = f"{len(bad)} of {len(outcomes)} checks failed: {', '.join(bad)}" if bad else "nothing stands in the way"
    print(f"{verdict} ({seconds:.0f} s)")
    return 1 if bad else 0


def show(name: str, outcome: Outcome) -> None:
    print(f"{outcome.status:<8} {name:<12} {outcome.found}")
    if outcome.remedy:
        print(f"{'':<8} {'':<12} -> {outcome.remedy}")
    sys.stdout.flush()


def read_flags(argv: Sequence[str]) -> tuple[RunConfig, list[str]]:
    """The configuration that the flags describe, however incomplete, and what is wrong with their words."""
    line = read_command_line(argv)
    values: dict[str, Any] = {}
    problems = list(line.problems)
    for path in line.recipes:
        recipe = read_recipe(path)
        values |= recipe.values
        problems += recipe.problems
    values |= line.values
    parts: dict[str, dict[str, Any]] = {section: {} for section in sections()}
    for key, value in values.items():
        if key in all_fields():
            parts[all_fields()[key].section][key] = value
    parts["engine"][PASS_THROUGH] = {
        key.removeprefix(PREFIX): value for key, value in values.items() if key not in all_fields()
    }
    cfg = RunConfig(**{section: cls(**parts[section]) for section, cls in sections().items()})
    if "actor_num_gpus_per_node" not in values and "num_gpus_per_node" not in values:
        cfg = replace(cfg, cluster=replace(cfg.cluster, actor_num_gpus_per_node=1, num_gpus_per_node=1))
    return cfg, problems


def flag_outcome(argv: Sequence[str], problems: Sequence[str]) -> Outcome:
    """All of a run's checks where the flags are a whole run's; else only their words."""
    if problems:
        return failed("; ".join(problems), "correct the flags; --help lists them")
    given = read_command_line(argv).values
    if "prompt_data" not in given:
        return ok(f"{len(given)} given; not those of a whole run, so they are not checked against each other")
    try:
        resolved = load_config(argv)
    except ConfigError as error:
        return failed(" ".join(str(error).split()), "each of the problems names its remedy")
    missing = check_paths(resolved.config)
    if missing:
        return failed("; ".join(missing), "each of the problems names its remedy")
    return ok(f"{len(given)} given, consistent")
