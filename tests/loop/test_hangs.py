"""Hangs that are provoked, and whom the watchdog names: a response that never ends, a stopped engine, a rank that stays
out of a collective, a reward that never comes. (The stopped engine alone also ends in `test_recovery.py`.)"""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from test_kills import command_of, family, is_gone, rows, start, wait_for

pytestmark = [pytest.mark.loop, pytest.mark.slow, pytest.mark.timeout(900)]

FUNCTIONS = '''
import asyncio

async def never_ends(turns, sample, sampling):
    """Group 8 is the first of the second step."""
    if sample.group_id == 8 and sample.index == 2:
        await asyncio.sleep(3600)
    await turns.generate(sample)

async def never_graded(response, label, metadata):
    await asyncio.sleep(3600)
'''
ONE = ("--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1")
TWO = ("--actor-num-gpus-per-node", "2", "--rollout-num-gpus", "1")
HANG = ("--hang-timeout-s", "40")


def nothing(_: list[psutil.Process]) -> list[str]:
    return []


def stop_engine(processes: list[psutil.Process]) -> list[str]:
    engine = next(p for p in processes if "embedded.server" in command_of(p) and "guardian" not in command_of(p))
    os.kill(engine.pid, signal.SIGSTOP)
    return [f"process {engine.pid} is stopped"]


def stop_rank(processes: list[psutil.Process]) -> list[str]:
    ranks = [process for process in processes if "ray::TrainWorker" in command_of(process)]
    assert len(ranks) == 2
    os.kill(ranks[1].pid, signal.SIGSTOP)
    return [f"process {ranks[1].pid} is stopped"]


CASES: dict[str, tuple[tuple[str, ...], int, Callable[[list[psutil.Process]], list[str]], list[str]]] = {
    # flags, steps before the hang is provoked, how, what the message has to say
    "a response that never ends": (
        (*ONE, "--custom-generate-function-path", "{functions}:never_ends"),
        1,
        nothing,
        ["the driver waits for", "1 samples wait for their responses", "sample 2 of group 8"],
    ),
    "an engine that does not answer": (
        ONE,
        1,
        stop_engine,
        ["the driver waits for", "engine 0 (http://127.0.0.1:", "does not answer"],
    ),
    "a rank outside of a collective": (TWO, 1, stop_rank, ["the driver waits for", "rank"]),
    "a reward that never comes": (
        (*ONE, "--custom-rm-path", "{functions}:never_graded", "--rm-timeout-s", "3600"),
        0,
        nothing,
        ["the driver waits for", "samples wait for their rewards", "of group"],
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_culprit_is_named(tiny_model: Path, task: Path, tmp_path: Path, case):
    flags, steps, provoke, said = case
    functions = tmp_path / "functions.py"
    functions.write_text(FUNCTIONS)
    flags = [flag.format(functions=functions) for flag in flags]
    console = tmp_path / "console.txt"
    driver = start(tiny_model, task, tmp_path / "run", 200, *flags, *HANG)
    processes: list[psutil.Process] = []
    try:
        wait_for(
            lambda: len(rows(tmp_path / "run")) >= steps or driver.poll() is not None, 400.0, lambda: "the first step"
        )
        assert driver.poll() is None, console.read_text()
        processes = family(driver)
        said = [*said, *provoke(processes)]
        wait_for(lambda: driver.poll() is not None, 300.0, lambda: f"the end of the driver; {console.read_text()}")
    finally:
        if driver.poll() is None:
            driver.kill()
        for process in processes:
            if not is_gone(process):
                process.kill()
    told = console.read_text()
    assert driver.returncode == 75, told
    for words in ("HangError: nothing has moved for", *said):
        assert words in told, told
