"""Generate and rollout functions of the user, and the examples that the documentation shows."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from fake_engine_server import EOS, FakeEngine
from managed_rollouts import ALPHABET, calculator, managed, slow_calculator, spell

from rlkit.config.hooks import HOOKS, check_source
from rlkit.config.rules import check_paths
from rlkit.config.schema import RunConfig
from rlkit.observability.ledger import LedgerEvent, read_ledger
from rlkit.rollout.debug_data import load_rollout
from rlkit.rollout.hooks import HookError
from rlkit.types.errors import ConfigError
from rlkit.types.samples import SampleGroup

MakeRun = Callable[..., RunConfig]
EXAMPLES = Path(__file__).parents[2] / "examples" / "hooks"
HEAD = "from dataclasses import replace\nfrom rlkit.types.samples import SampleStatus\n"


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, timeout=60))


def hook(tmp_path: Path, source: str, name: str = "f") -> str:
    path = tmp_path / f"hook_{len(source)}_{sum(map(ord, source))}.py"
    path.write_text(HEAD + source)
    return f"{path}:{name}"


def one_step(
    make_run: MakeRun, tmp_path: Path, engine: FakeEngine, **rollout: Any
) -> tuple[list[SampleGroup], dict[str, float]]:
    dump = tmp_path / "r.jsonl"
    cfg = make_run(rollout=rollout, debug={"save_debug_rollout_data": str(dump)})
    assert check_paths(cfg) == []

    async def main() -> dict[str, float]:
        async with managed(cfg, tmp_path, engine, dp=1) as manager:
            return (await manager.generate(0)).metrics

    metrics = run(main())
    return load_rollout(dump)[1], metrics


# ---- generate --------------------------------------------------------------------------------------------------------


def talker(body: dict[str, Any]) -> tuple[list[int], str]:
    """Says `9`, and the end of a turn."""
    return [ALPHABET.index("9") + 2, EOS], "9"


TWO_TURNS = """
async def f(turns, sample, sampling):
    if await turns.generate(sample):
        if turns.append(sample, "+1="):
            await turns.generate(sample)
"""


def test_environment_tokens_are_masked_and_nothing_is_tokenised_twice(make_run: MakeRun, tmp_path: Path):
    engine = FakeEngine(speech=talker)
    groups, metrics = one_step(make_run, tmp_path, engine, custom_generate_function_path=hook(tmp_path, TWO_TURNS))
    for sample in (s for group in groups for s in group.samples):
        assert sample.loss_mask == [1, 1, 0, 0, 0, 1, 1] and sample.response == "9+1=9"
        assert sample.rollout_logprobs[2:5] == [0.0] * 3 and all(p < 0 for p in sample.rollout_logprobs[:2])
        assert sample.weight_versions == [0]
    second = [body for body in engine.requests if EOS in body["input_ids"]]
    assert len(second) == 12
    for body in second:  # what the engine said is sent back as it was, and its budget shrinks by both
        assert spell(body["input_ids"]).endswith("9+1=") and body["sampling_params"]["max_new_tokens"] == 16 - 5
    assert metrics["rollout/failed"] == 0


def test_environment_tokens_without_room_truncate(make_run: MakeRun, tmp_path: Path):
    source = (
        "async def f(turns, sample, sampling):\n    await turns.generate(sample)\n"
        "    assert not turns.append(sample, '1' * 14)\n"
    )
    groups, metrics = one_step(
        make_run, tmp_path, FakeEngine(speech=talker), custom_generate_function_path=hook(tmp_path, source)
    )
    assert metrics["rollout/truncated_ratio"] == 1.0 and metrics["rollout/response_length"] == 2.0
    assert groups[0].samples[0].status == "truncated"


FAN_OUT = """
async def f(turns, sample, sampling):
    await turns.generate(sample)
    other = turns.fork(sample, prompt="1+1=" if sample.index == 0 else None)
    await turns.generate(other)
    return [sample, other]
"""


def test_a_rollout_may_fan_out_into_several_samples(make_run: MakeRun, tmp_path: Path):
    engine = FakeEngine(speech=calculator())
    groups, metrics = one_step(make_run, tmp_path, engine, custom_generate_function_path=hook(tmp_path, FAN_OUT))
    assert metrics["rollout/num_samples"] == 24
    assert [s.index for s in groups[3].samples] == [0, 0, 1, 1, 2, 2]
    assert spell(groups[3].samples[1].tokens).startswith("1+1=") and spell(groups[3].samples[3].tokens).startswith(
        "3+3="
    )
    assert all(s.reward is not None for s in groups[3].samples)


def test_a_function_that_raises_costs_its_sample_only(make_run: MakeRun, tmp_path: Path):
    source = (
        "async def f(turns, sample, sampling):\n    await turns.generate(sample)\n"
        "    if sample.index == 1:\n        raise OSError('tool is gone')\n"
    )
    _, metrics = one_step(
        make_run, tmp_path, FakeEngine(speech=calculator()), custom_generate_function_path=hook(tmp_path, source)
    )
    assert metrics["rollout/failed"] == 4 and metrics["rollout/num_samples"] == 12


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [1]", "must return None or a list of samples"),
        ("return []", "must return None or a list of samples"),
        ("pass", "never called turns.generate"),
        ("await turns.generate(sample)\n    sample.tokens.append(5)", "grow it with turns.generate and turns.append"),
        ("await turns.generate(sample)\n    sample.tokens[0] += 1", "changed tokens that were there before"),
        ("await turns.generate(sample)\n    return [replace(sample, index=7)]", "sample of another rollout"),
    ],
)
def test_results_that_break_the_rules_are_named(make_run: MakeRun, tmp_path: Path, body: str, message: str):
    path = hook(tmp_path, f"async def f(turns, sample, sampling):\n    {body}\n")
    with pytest.raises(HookError, match=message):
        one_step(make_run, tmp_path, FakeEngine(speech=calculator()), custom_generate_function_path=path)


def test_evaluation_calls_the_function_too(make_run: MakeRun, tmp_path: Path):
    rows = tmp_path / "eval.jsonl"
    rows.write_text(json.dumps({"input": "2+2=", "label": "E"}) + "\n")
    source = (
        "async def f(turns, sample, sampling):\n    await turns.generate(sample)\n"
        "    sample.response = 'E' if turns.evaluation else 'T'\n"
    )
    cfg = make_run(
        rollout={"custom_generate_function_path": hook(tmp_path, source)},
        evaluation={"eval_interval": 1, "eval_prompt_data": ("x", str(rows))},
    )

    async def main() -> dict[str, float]:
        async with managed(cfg, tmp_path, FakeEngine(speech=calculator())) as manager:
            return await manager.evaluate(0)

    assert run(main())["eval/x"] == 1.0


# ---- the rollout function --------------------------------------------------------------------------------------------


def test_a_rollout_function_makes_the_batch(make_run: MakeRun, tmp_path: Path):
    engine = FakeEngine(speech=slow_calculator())
    groups, metrics = one_step(make_run, tmp_path, engine, rollout_function_path=f"{EXAMPLES / 'functions.py'}:rollout")
    assert len(groups) == 4 and metrics["rollout/groups_tried"] == 8 and metrics["rollout/groups_dropped"] == 4
    events = list(read_ledger(tmp_path / "ledger.jsonl"))
    dropped = {r.fields["group"] for r in events if r.event is LedgerEvent.DROPPED}
    kept = {r.fields["group"] for r in events if r.event is LedgerEvent.KEPT}
    assert dropped | kept == set(range(8)) and len(dropped) == len(kept) == 4


def test_groups_may_be_put_back(make_run: MakeRun, tmp_path: Path):
    source = (
        "async def f(job):\n    groups = job.next_groups(6)\n    job.put_back(groups[:2])\n"
        "    await job.run(groups[2:])\n    return groups[2:]\n"
    )
    groups, metrics = one_step(
        make_run, tmp_path, FakeEngine(speech=slow_calculator()), rollout_function_path=hook(tmp_path, source)
    )
    assert [g.group_id for g in groups] == [2, 3, 4, 5] and metrics["rollout/groups_waiting"] == 2


@pytest.mark.parametrize("result", ["groups[:3]", "groups[:2] * 2", "None", "[1, 2, 3, 4]"])
def test_a_batch_of_another_size_is_refused(make_run: MakeRun, tmp_path: Path, result: str):
    source = f"async def f(job):\n    groups = job.next_groups(4)\n    await job.run(groups)\n    return {result}\n"
    with pytest.raises(HookError, match=r"list of 4 \(--rollout-batch-size\)"):
        one_step(make_run, tmp_path, FakeEngine(speech=calculator()), rollout_function_path=hook(tmp_path, source))


# ---- signatures, before anything runs --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "source", "message"),
    [
        ("custom_generate_function_path", "def f(a, b, c):\n    pass", "is a plain function, write `async def f`"),
        (
            "custom_generate_function_path",
            "async def f(args, s, p, evaluation):\n    pass",
            r"has \(args, s, p, evaluation\)",
        ),
        ("rollout_function_path", "async def f():\n    pass", r"wants async \(job: RolloutJob\)"),
        ("dynamic_sampling_filter_path", "def f(args, samples):\n    pass", r"wants \(group: SampleGroup\)"),
        ("buffer_filter_path", "def g(a, b, c):\n    pass", "has no 'f', it has g"),
        ("rollout_sample_filter_path", "def f(a, *, b):\n    pass", r"has \(a, \*, b\)"),
        ("rollout_all_samples_process_path", "def f(:", "is not Python"),
        ("custom_rm_path", "def f(response, label):\n    pass", r"has \(response, label\)"),
    ],
)
def test_wrong_functions_are_found_without_running_them(tmp_path: Path, field: str, source: str, message: str):
    import re

    path = tmp_path / "own.py"
    path.write_text(f"{source}\n")
    problem = check_source(HOOKS[field], f"{path}:f")
    assert problem is not None and re.search(message, problem), problem


@pytest.mark.parametrize(
    "source", ["async def f(*a):\n    pass", "async def f(a, b, c, d=1):\n    pass", "from x import f"]
)
def test_functions_that_may_fit_pass_the_first_check(tmp_path: Path, source: str):
    path = tmp_path / "own.py"
    path.write_text(f"raise SystemExit  # never run\n{source}\n")
    assert check_source(HOOKS["custom_generate_function_path"], f"{path}:f") is None


def test_an_imported_plain_function_is_refused_where_it_must_be_async(make_run: MakeRun, tmp_path: Path):
    path = hook(tmp_path, "def g(turns, sample, sampling):\n    pass\nf = g\n")
    with pytest.raises(ConfigError, match="must be a coroutine function"):
        one_step(make_run, tmp_path, FakeEngine(), custom_generate_function_path=path)


# ---- the examples ----------------------------------------------------------------------------------------------------


def test_the_calculator_example_asks_and_goes_on(make_run: MakeRun, tmp_path: Path):
    def speech(body: dict[str, Any]) -> tuple[list[int], str]:
        said = spell(body["input_ids"]).partition("=")[2]
        text = {"": "12+30=", "12+30=42 ": "42+1=", "12+30=42 42+1=43 ": "43"}[said]
        ids = [ALPHABET.index(character) + 2 for character in text]
        return (ids, text) if text.endswith("=") else ([*ids, EOS], text)

    engine = FakeEngine(speech=speech)
    engine.spell = spell
    path = f"{EXAMPLES / 'calculator_tool.py'}:generate"
    groups, _ = one_step(make_run, tmp_path, engine, custom_generate_function_path=path, rollout_max_response_len=40)
    for sample in (s for group in groups for s in group.samples):
        assert spell(sample.tokens[sample.prompt_length :]) == "12+30=42 42+1=43 43" and sample.tokens[-1] == EOS
        assert sample.loss_mask == [1] * 6 + [0] * 3 + [1] * 5 + [0] * 3 + [1] * 3
        assert sample.status == "completed"
    assert len(engine.requests) == 36


def test_every_example_fits_its_hook(make_run: MakeRun, tmp_path: Path):
    where = f"{EXAMPLES / 'functions.py'}:"
    dump = tmp_path / "r.jsonl"
    cfg = make_run(
        rollout={
            "over_sampling_batch_size": 6,
            "partial_rollout": True,
            "dynamic_sampling_filter_path": where + "neither_trivial_nor_hopeless",
            "buffer_filter_path": where + "shortest_first",
            "rollout_sample_filter_path": where + "leave_out_truncated",
            "rollout_all_samples_process_path": where + "count_prompts",
        },
        reward={
            "rm_type": None,
            "custom_rm_path": where + "reward",
            "rm_num_workers": 1,
            "custom_reward_post_process_path": where + "relative_to_the_best",
        },
        debug={"save_debug_rollout_data": str(dump)},
    )
    assert check_paths(cfg) == []

    async def main() -> None:
        engine = FakeEngine(speech=slow_calculator())
        engine.spell = spell
        async with managed(cfg, tmp_path, engine) as manager:
            for step in range(2):
                await manager.generate(step)

    run(main())
    assert len(load_rollout(dump)[1]) == 4


# ---- rewards of a batch ----------------------------------------------------------------------------------------------


def test_post_processed_rewards_are_trained_on_and_the_graders_are_reported(make_run: MakeRun, tmp_path: Path):
    source = "def f(groups):\n    return [[-s.reward for s in g.samples] for g in groups]\n"
    engine = FakeEngine(speech=calculator())

    def advantages(folder: Path, **reward: Any) -> tuple[list[float], float]:
        async def main() -> tuple[list[float], float]:
            async with managed(make_run(reward=reward), folder, engine) as manager:
                batch = await manager.generate(0)
                (update,) = batch.shards[0]
                by_sample = {
                    i: a
                    for packed in update.micro_batches
                    for i, a in zip(packed.sample_ids_S.tolist(), packed.advantages_S.tolist(), strict=True)
                }
                return [by_sample[i] for i in sorted(by_sample)], batch.metrics["rollout/reward"]

        return run(main())

    plain, reward = advantages(tmp_path / "a")
    flipped, same_reward = advantages(tmp_path / "b", custom_reward_post_process_path=hook(tmp_path, source))
    assert any(plain) and flipped == pytest.approx([-value for value in plain]) and same_reward == reward


@pytest.mark.parametrize("result", ["[[0.0]]", "None", "[[0.0] * 2] * 4"])
def test_post_processed_rewards_must_fit_the_batch(make_run: MakeRun, tmp_path: Path, result: str):
    path = hook(tmp_path, f"def f(groups):\n    return {result}\n")

    async def main() -> None:
        cfg = make_run(reward={"custom_reward_post_process_path": path})
        async with managed(cfg, tmp_path, FakeEngine(speech=calculator())) as manager:
            await manager.generate(0)

    with pytest.raises(HookError, match="must return 4 lists"):
        run(main())


def test_group_rewards_in_a_rollout(make_run: MakeRun, tmp_path: Path):
    source = "def f(responses, label, metadata):\n    return [float(i) for i, _ in enumerate(responses)]\n"
    reward = {"rm_type": None, "custom_rm_path": hook(tmp_path, source), "group_rm": True, "rm_num_workers": 1}
    dump = tmp_path / "r.jsonl"
    cfg = make_run(reward=reward, debug={"save_debug_rollout_data": str(dump)})

    async def main() -> None:
        async with managed(cfg, tmp_path, FakeEngine(speech=calculator())) as manager:
            await manager.generate(0)

    run(main())
    assert all([s.reward for s in group.samples] == [0.0, 1.0, 2.0] for group in load_rollout(dump)[1])
