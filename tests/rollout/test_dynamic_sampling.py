"""Groups are judged as they finish; enough of them end the step, too few end it with an error."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from fake_engine_server import FakeEngine
from managed_rollouts import managed, slow_calculator, spell

import rlkit.rollout.generator as generator_module
from rlkit.config.schema import RunConfig
from rlkit.observability.ledger import LedgerEvent, read_ledger
from rlkit.rollout.debug_data import load_rollout
from rlkit.rollout.hooks import (
    FilterVerdict,
    HookError,
    check_reward_nonzero_std,
    check_reward_nonzero_std_with_fallback,
    load_group_filter,
)
from rlkit.types.errors import ConfigError, DataError, EngineError
from rlkit.types.samples import Prompt, Sample, SampleGroup, SampleStatus

MakeRun = Callable[..., RunConfig]
NONZERO = "check_reward_nonzero_std"


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, timeout=60))


def rows(run_dir: Path, event: LedgerEvent) -> list[dict[str, Any]]:
    return [record.fields for record in read_ledger(run_dir / "ledger.jsonl") if record.event is event]


def engine_that_differs_on(*rows: int) -> FakeEngine:
    """Right for some samples of the prompts `a+a` with `a` in rows, wrong for all samples of the others."""

    def speech(body: dict[str, Any]) -> tuple[list[int], str]:
        a = int(spell(body["input_ids"]).split("+")[0])
        seed = body["sampling_params"]["sampling_seed"]
        first = a in rows and seed not in speech.seen[a] and not speech.seen[a]  # type: ignore[attr-defined]
        speech.seen[a].add(seed)  # type: ignore[attr-defined]
        return slow_calculator(right=lambda _: first)(body)

    speech.seen = {a: set() for a in range(10)}  # type: ignore[attr-defined]
    engine = FakeEngine(speech=speech)
    engine.spell = spell
    return engine


async def one_step(cfg: RunConfig, run_dir: Path, engine: FakeEngine, step: int = 0) -> Any:
    async with managed(cfg, run_dir, engine) as manager:
        batch = await manager.generate(step)
        return batch.metrics, manager.state()


def test_groups_of_equal_rewards_are_dropped_and_others_drawn(make_run: MakeRun, tmp_path: Path):
    dump = tmp_path / "r.jsonl"
    cfg = make_run(rollout={"dynamic_sampling_filter_path": NONZERO}, debug={"save_debug_rollout_data": str(dump)})
    metrics, state = run(one_step(cfg, tmp_path, engine_that_differs_on(1, 3, 4, 6, 7)))
    groups = load_rollout(dump)[1]
    assert len(groups) == 4 and {g.prompt.position for g in groups} < {1, 3, 4, 6, 7}
    assert all({s.reward for s in g.samples} == {0.0, 1.0} for g in groups)
    dropped = rows(tmp_path, LedgerEvent.DROPPED)
    assert dropped and {row["reason"] for row in dropped} == {"zero_std_0.0"}
    assert metrics["rollout/dynamic_filter/drop_zero_std_0.0"] == metrics["rollout/groups_dropped"] == len(dropped)
    tried = {row["group"] for row in rows(tmp_path, LedgerEvent.ISSUED)}
    kept = {row["group"] for row in rows(tmp_path, LedgerEvent.KEPT)}
    cut_off = {row["group"] for row in rows(tmp_path, LedgerEvent.BUFFERED)}
    assert metrics["rollout/groups_tried"] == len(tried) == state["next_group_id"] == 8
    assert kept | cut_off | {row["group"] for row in dropped} == tried
    assert len(kept) + len(cut_off) + len(dropped) == len(tried), "no group has two fates"
    assert {item["group"]["group_id"] for item in state["waiting"]} == cut_off


def test_the_rest_is_cut_off_the_moment_enough_are_kept(make_run: MakeRun, tmp_path: Path):
    engine = FakeEngine(speech=slow_calculator())
    engine.holds = lambda body: int(spell(body["input_ids"]).split("+")[0]) in (1, 4)
    cfg = make_run(rollout={"over_sampling_batch_size": 6})
    metrics, state = run(one_step(cfg, tmp_path, engine))
    assert engine.aborts and engine.num_running == 0
    assert [row["group"] for row in rows(tmp_path, LedgerEvent.KEPT)] == [0, 2, 3, 5]
    assert [(row["group"], row["reason"]) for row in rows(tmp_path, LedgerEvent.BUFFERED)] == [
        (1, "start_anew"),
        (4, "start_anew"),
    ]
    assert metrics["rollout/groups_cut_off"] == metrics["rollout/groups_waiting"] == 2
    waiting = [item["group"]["samples"] for item in state["waiting"]]
    assert all(len(s["tokens"]) == s["prompt_length"] and s["status"] == "pending" for w in waiting for s in w)


def test_a_prompt_that_was_cut_off_is_neither_skipped_nor_repeated(make_run: MakeRun, tmp_path: Path):
    engine = FakeEngine(speech=slow_calculator())
    engine.holds = lambda body: engine.weight_version == 0 and int(spell(body["input_ids"]).split("+")[0]) in (1, 4)
    cfg = make_run(rollout={"over_sampling_batch_size": 6})

    async def both(resume: bool) -> list[list[int]]:
        engine.weight_version = 0
        engine.requests.clear()
        run_dir = tmp_path / f"resume_{resume}"
        async with managed(cfg, run_dir, engine) as manager:
            await manager.generate(0)
            state = json.loads(json.dumps(manager.state()))
            engine.weight_version = 1
            if not resume:
                await manager.generate(1)
        if resume:
            async with managed(cfg, run_dir, engine) as manager:
                manager.load_state(state)
                await manager.generate(1)
        return [
            sorted(row["group"] for row in rows(run_dir, LedgerEvent.KEPT) if row["step"] == step) for step in (0, 1)
        ]

    for resume in (False, True):
        first, second = run(both(resume))
        assert first == [0, 2, 3, 5] and len(second) == 4
        assert {1, 4} <= set(second) | {
            row["group"] for row in rows(tmp_path / f"resume_{resume}", LedgerEvent.BUFFERED)
        }
        issued = [row["group"] for row in rows(tmp_path / f"resume_{resume}", LedgerEvent.ISSUED)]
        assert issued == list(range(10)), "six in the first step, four more in the second"


def test_a_filter_that_keeps_nothing_is_an_error_with_the_counts(make_run: MakeRun, tmp_path: Path):
    cfg = make_run(rollout={"dynamic_sampling_filter_path": NONZERO, "dynamic_sampling_max_groups": 10})
    engine = engine_that_differs_on(2)
    with pytest.raises(DataError, match=r"of 10 groups tried only 1 were kept, 4 .*9 zero_std_0\.0.*with_fallback"):
        run(one_step(cfg, tmp_path, engine))
    assert len(engine.requests) == 30, "no more than the bound"


def test_the_fallback_fills_the_batch_instead_of_sampling_on(make_run: MakeRun, tmp_path: Path):
    dump = tmp_path / "r.jsonl"
    cfg = make_run(
        rollout={"dynamic_sampling_filter_path": f"{NONZERO}_with_fallback", "over_sampling_batch_size": 6},
        debug={"save_debug_rollout_data": str(dump)},
    )
    metrics, _ = run(one_step(cfg, tmp_path, engine_that_differs_on(0, 5)))
    groups = load_rollout(dump)[1]
    assert {0, 5} <= {g.prompt.position for g in groups} and len(groups) == 4
    assert metrics["rollout/groups_tried"] == 6 and metrics["rollout/groups_dropped"] == 2


def test_dead_engines_are_named_where_a_filter_drops_everything(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(generator_module, "FIRST_BACKOFF_S", 0.001)
    engine = FakeEngine()
    engine.failures = [500] * 10000
    cfg = make_run(rollout={"dynamic_sampling_filter_path": NONZERO, "dynamic_sampling_max_groups": 4})
    with pytest.raises(EngineError, match=r"12 samples failed.*told to fail"):
        run(one_step(cfg, tmp_path, engine))


# ---- filters ---------------------------------------------------------------------------------------------------------


def group_of(*rewards: float | None) -> SampleGroup:
    samples = [
        Sample(
            group_id=0, index=i, seed=i, tokens=[1, 2], prompt_length=1, status=SampleStatus.COMPLETED, reward=reward
        )
        for i, reward in enumerate(rewards)
    ]
    return SampleGroup(group_id=0, prompt=Prompt(position=0, epoch=0, token_ids=[1], text=""), samples=samples)


@pytest.mark.parametrize(
    ("rewards", "keep", "reason", "fallback"),
    [
        ((0.0, 1.0), True, "", False),
        ((1.0, 1.0), False, "zero_std_1.0", True),
        ((0.25, None, 0.25), False, "zero_std_0.2", True),
        ((1.0, None), False, "zero_std_1.0", True),
        ((None, None), False, "unscored", False),
        ((0.0, 1e-9), False, "zero_std_0.0", True),
    ],
)
def test_built_in_filters(rewards: tuple[float | None, ...], keep: bool, reason: str, fallback: bool):
    verdict = check_reward_nonzero_std(group_of(*rewards))
    assert (verdict.keep, verdict.reason, verdict.keep_when_insufficient) == (keep, reason, False)
    verdict = check_reward_nonzero_std_with_fallback(group_of(*rewards))
    assert (verdict.keep, verdict.reason, verdict.keep_when_insufficient) == (keep, reason, fallback)


def test_slimes_own_path_names_the_same_filter():
    judge = load_group_filter(f"slime.rollout.filter_hub.dynamic_sampling_filters.{NONZERO}")
    assert judge is not None and judge(group_of(1.0, 1.0)).reason == "zero_std_1.0"


def own(tmp_path: Path, source: str) -> str:
    path = tmp_path / f"own_{abs(hash(source))}.py"
    path.write_text("from rlkit.rollout.hooks import FilterVerdict\n" + source)
    return f"{path}:f"


def test_own_filters_may_return_a_bool_or_a_verdict(tmp_path: Path):
    judge = load_group_filter(own(tmp_path, "def f(group):\n    return len(group.samples) > 1\n"))
    assert judge is not None and judge(group_of(1.0, 1.0)) == FilterVerdict(keep=True)
    assert judge(group_of(1.0)) == FilterVerdict(keep=False, reason="filtered")
    judge = load_group_filter(own(tmp_path, "def f(group):\n    return FilterVerdict(keep=False, reason='easy')\n"))
    assert judge is not None and judge(group_of(1.0)).reason == "easy"


def test_a_wrong_answer_or_signature_of_a_filter_shows_the_right_one(tmp_path: Path):
    judge = load_group_filter(own(tmp_path, "def f(group):\n    return 0.5\n"))
    assert judge is not None
    with pytest.raises(HookError, match=r"returned '0.5'; its signature is \(group: SampleGroup\) -> bool"):
        judge(group_of(1.0))
    with pytest.raises(ConfigError, match=r"one argument .*wanted is \(group: SampleGroup\)"):
        load_group_filter(own(tmp_path, "def f(args, samples):\n    return True\n"))


def test_sample_filter_masks_and_all_samples_are_shown(make_run: MakeRun, tmp_path: Path):
    hooks = tmp_path / "hooks.py"
    hooks.write_text(
        "import json, pathlib\n"
        "def leave_out(groups):\n"
        "    return [s for g in groups for s in g.samples if s.index == 0]\n"
        "def show(groups, step):\n"
        f"    seen = pathlib.Path({str(tmp_path / 'seen.json')!r})\n"
        "    seen.write_text(json.dumps([step, sorted(g.group_id for g in groups)]))\n"
    )
    cfg = make_run(
        rollout={
            "dynamic_sampling_filter_path": NONZERO,
            "rollout_sample_filter_path": f"{hooks}:leave_out",
            "rollout_all_samples_process_path": f"{hooks}:show",
        }
    )
    run(one_step(cfg, tmp_path, engine_that_differs_on(0, 2, 5, 6), step=3))
    masked = [row for row in rows(tmp_path, LedgerEvent.DROPPED) if row["reason"] == "masked"]
    assert len(masked) == 4 and all(row["indices"] == [0] for row in masked)
    step, seen = json.loads((tmp_path / "seen.json").read_text())
    dropped = {row["group"] for row in rows(tmp_path, LedgerEvent.DROPPED) if row["reason"] != "masked"}
    kept = {row["group"] for row in rows(tmp_path, LedgerEvent.KEPT)}
    assert step == 3 and dropped and set(seen) == dropped | kept
