"""A rollout manager over a fake engine that can add, and the recorded bug cases."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fake_engine_server import EOS, FakeEngine, running_engine, running_router

from rlkit.config.schema import RunConfig
from rlkit.observability.spans import Spans
from rlkit.rollout.manager import RolloutManager

ALPHABET = "0123456789+= "
"""Token 2 + i of the test tokenizer is character i."""


def bug_case(case_id: str) -> dict[str, Any]:
    text = (Path(__file__).parents[1] / "data" / "cases.jsonl").read_text("utf-8")
    return next(case for line in text.split("\n") if line and (case := json.loads(line))["id"] == case_id)


def calculator(*, right: Callable[[int], bool] = lambda seed: seed % 2 == 0) -> Callable[[dict[str, Any]], Any]:
    """Speech of an engine that does the sum of its prompt: right where `right(seed)`, else one too much."""

    def speak(body: dict[str, Any]) -> tuple[list[int], str]:
        question = "".join(ALPHABET[token - 2] for token in body["input_ids"])
        a, b = question.rstrip("=").split("+")
        text = str(int(a) + int(b) + (not right(body["sampling_params"]["sampling_seed"])))
        return [ALPHABET.index(digit) + 2 for digit in text] + [EOS], text

    return speak


def spell(ids: list[int]) -> str:
    return "".join(ALPHABET[token - 2] for token in ids if token != EOS)


def slow_calculator(*, right: Callable[[int], bool] = lambda seed: seed % 2 == 0) -> Callable[[dict[str, Any]], Any]:
    """The same with blanks up to six characters, and able to go on where a response was cut off."""

    def speak(body: dict[str, Any]) -> tuple[list[int], str]:
        question, _, said = spell(body["input_ids"]).partition("=")
        a, b = question.split("+")
        whole = str(int(a) + int(b) + (not right(body["sampling_params"]["sampling_seed"]))).ljust(6)
        assert whole.startswith(said), (whole, said)
        rest = whole[len(said) :]
        return [ALPHABET.index(character) + 2 for character in rest] + [EOS], rest

    return speak


@asynccontextmanager
async def managed(
    cfg: RunConfig, run_dir: Path, engine: FakeEngine | None = None, *, dp: int = 1, **more: Any
) -> AsyncIterator[RolloutManager]:
    """A manager on one fake engine behind the fake router; without an engine where the config starts none."""
    if engine is None:
        manager = RolloutManager(cfg, run_dir=run_dir, dp=dp, router_url=None, engine_urls=[], spans=Spans(), **more)
        try:
            yield manager
        finally:
            await manager.close()
        return
    more.setdefault("spans", Spans())
    async with running_engine(engine), running_router([engine.url]) as router_url:
        manager = RolloutManager(cfg, run_dir=run_dir, dp=dp, router_url=router_url, engine_urls=[engine.url], **more)
        try:
            yield manager
        finally:
            await manager.close()
