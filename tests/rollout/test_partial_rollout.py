"""Groups that are cut off keep what they have, wait in the state, and are continued at the next weights."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from fake_engine_server import EOS, FakeEngine
from managed_rollouts import managed, slow_calculator, spell

from rlkit.config.schema import RunConfig
from rlkit.observability.audit import AuditReport, audit
from rlkit.observability.ledger import LedgerEvent, LedgerRecord, read_ledger
from rlkit.rollout.debug_data import load_rollout
from rlkit.rollout.hooks import HookError, WaitingGroup, load_buffer_filter
from rlkit.types.errors import DataError
from rlkit.types.samples import Prompt, Sample, SampleGroup

MakeRun = Callable[..., RunConfig]
PARTIAL = {"over_sampling_batch_size": 6, "partial_rollout": True}
SLOW = (1, 4)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, timeout=60))


def row_of(body: dict[str, Any]) -> int:
    return int(spell(body["input_ids"]).split("+")[0])


def engine_slow_until(version: int) -> FakeEngine:
    """Requests of the prompts SLOW are held, and cut off after two tokens, until the weights are `version`."""
    engine = FakeEngine(speech=slow_calculator())
    engine.spell = spell
    engine.holds = lambda body: row_of(body) in SLOW and engine.weight_version < version
    return engine


async def steps(
    cfg: RunConfig, run_dir: Path, engine: FakeEngine, count: int, *, resume_at: int | None = None
) -> list[dict[str, float]]:
    """`count` rollouts, each at its own weight version; with `resume_at` a new manager takes over there from JSON."""
    metrics: list[dict[str, float]] = []
    state: dict[str, Any] | None = None
    for part in (range(resume_at or count), range(resume_at or count, count)):
        async with managed(cfg, run_dir, engine) as manager:
            if state is not None:
                manager.load_state(json.loads(json.dumps(state)))
            for step in part:
                engine.weight_version = step
                metrics.append((await manager.generate(step)).metrics)
                manager.record_trained(step)
            state = manager.state()
    return metrics


def audit_of(run_dir: Path) -> AuditReport:
    """Of the ledger, behind the start that the driver writes."""
    fields = {"step": 0, "source": "engines", "rollout_state": {}}
    return audit(
        [LedgerRecord(event=LedgerEvent.STARTED, time=0.0, fields=fields), *read_ledger(run_dir / "ledger.jsonl")]
    )


def dumped(tmp_path: Path, step: int) -> dict[int, SampleGroup]:
    return {group.group_id: group for group in load_rollout(tmp_path / f"r_{step}.jsonl")[1]}


def config(make_run: MakeRun, tmp_path: Path, **more: Any) -> RunConfig:
    return make_run(
        rollout={**PARTIAL, **more}, debug={"save_debug_rollout_data": str(tmp_path / "r_{rollout_id}.jsonl")}
    )


@pytest.mark.parametrize("resume_at", [None, 1], ids=["same_manager", "resumed_from_json"])
def test_cut_off_samples_go_on_at_the_next_weights(make_run: MakeRun, tmp_path: Path, resume_at: int | None):
    engine = engine_slow_until(1)
    cfg = config(make_run, tmp_path)
    first, second = run(steps(cfg, tmp_path, engine, 2, resume_at=resume_at))
    assert first["rollout/groups_cut_off"] == 2 and first["rollout/groups_continued"] == 0
    assert second["rollout/groups_continued"] == 2
    assert sorted(dumped(tmp_path, 0)) == [0, 2, 3, 5]
    groups = dumped(tmp_path, 1)
    assert {1, 4} < set(groups)
    for group in (groups[1], groups[4]):
        for sample in group.samples:
            assert sample.weight_versions == [0, 1] and sample.version_starts == [0, 2]
            assert sample.tokens[-1] == EOS and sample.response_length == 7 and len(sample.response) == 6
            assert sample.loss_mask == [1] * 7 and len(sample.rollout_logprobs) == 7
            assert sample.reward == float(sample.response.strip() == sample.label)
    continued = [body for body in engine.requests[18:] if row_of(body) in SLOW]
    assert len(continued) == 6
    assert {body["sampling_params"]["max_new_tokens"] for body in continued} == {16 - 2}, "two tokens are spent"
    assert all(len(body["input_ids"]) == 4 + 2 for body in continued)
    issued = [r.fields["group"] for r in read_ledger(tmp_path / "ledger.jsonl") if r.event is LedgerEvent.ISSUED]
    assert issued == list(range(10)), "a continued group is not issued again"
    assert audit_of(tmp_path).problems == []


def test_tokens_of_older_weights_can_be_masked(make_run: MakeRun, tmp_path: Path):
    cfg = config(make_run, tmp_path, mask_offpolicy_in_partial_rollout=True)
    run(steps(cfg, tmp_path, engine_slow_until(2), 3))
    groups = {**dumped(tmp_path, 1), **dumped(tmp_path, 2)}
    for sample in (*groups[1].samples, *groups[4].samples):
        # 2 tokens of v0, 2 of v1, the last 3 of v2: only those of the newest weights train
        assert sample.weight_versions == [0, 1, 2]
        assert sample.loss_mask == [0, 0, 0, 0, 1, 1, 1] and len(sample.rollout_logprobs) == 7


def test_finished_groups_beyond_the_batch_wait_with_their_rewards(make_run: MakeRun, tmp_path: Path):
    """All six groups of a step may finish before the first is judged; what is over is trained on next."""
    cfg = config(make_run, tmp_path)
    engine = FakeEngine(speech=slow_calculator())
    engine.spell = spell
    run(steps(cfg, tmp_path, engine, 3))
    trained = [group for step in range(3) for group in dumped(tmp_path, step)]
    assert sorted(trained) == list(range(12)), "in order, each once"


def test_a_group_is_not_cut_off_again_beyond_the_limit(make_run: MakeRun, tmp_path: Path):
    cfg = config(make_run, tmp_path, partial_rollout_max_continuations=1)
    engine = engine_slow_until(5)  # would be cut off five times

    async def main() -> None:
        async with managed(cfg, tmp_path, engine) as manager:
            await manager.generate(0)
            second = asyncio.create_task(manager.generate(1))
            await asyncio.sleep(0.5)
            assert not second.done(), "the step waits for groups at their limit"
            engine.weight_version = 1
            for event in engine.held.values():
                event.set()
            await second

    run(main())
    groups = dumped(tmp_path, 1)
    assert {1, 4} < set(groups), "and trains on them"
    assert all(s.tokens[-1] == EOS for s in (*groups[1].samples, *groups[4].samples))


def test_samples_that_something_else_aborts_are_continued_too(make_run: MakeRun, tmp_path: Path):
    cfg = config(make_run, tmp_path)
    engine = engine_slow_until(1)

    async def main() -> None:
        async with managed(cfg, tmp_path, engine) as manager:
            step = asyncio.create_task(manager.generate(0))
            await asyncio.sleep(0)
            while len(engine.held) < 6:
                await asyncio.sleep(0.01)
            engine.cut_off_all()  # before four groups are there, perhaps
            await step
            engine.weight_version = 1
            await manager.generate(1)

    run(main())
    assert not {1, 4} & set(dumped(tmp_path, 0)) and {1, 4} < set(dumped(tmp_path, 1))
    assert all(s.status == "completed" for g in dumped(tmp_path, 1).values() for s in g.samples)


def test_without_partial_rollouts_a_resumed_run_starts_them_anew(make_run: MakeRun, tmp_path: Path):
    engine = engine_slow_until(1)

    async def main() -> dict[str, Any]:
        async with managed(config(make_run, tmp_path), tmp_path, engine) as manager:
            await manager.generate(0)
            state = manager.state()
        assert [len(item["group"]["samples"][0]["loss_mask"]) for item in state["waiting"]] == [2, 2]
        async with managed(make_run(rollout={"over_sampling_batch_size": 6}), tmp_path, engine) as manager:
            manager.load_state(json.loads(json.dumps(state)))
            return manager.state()

    waiting = run(main())["waiting"]
    assert [item["group"]["group_id"] for item in waiting] == [1, 4]
    assert all(not s["loss_mask"] and s["status"] == "pending" for item in waiting for s in item["group"]["samples"])


def test_a_damaged_waiting_group_is_named(make_run: MakeRun, tmp_path: Path):
    async def main() -> None:
        async with managed(config(make_run, tmp_path), tmp_path, engine_slow_until(1)) as manager:
            await manager.generate(0)
            state = json.loads(json.dumps(manager.state()))
            state["waiting"][0]["group"]["samples"][0]["loss_mask"].pop()
            manager.load_state(state)

    with pytest.raises(DataError, match=r"rollout_state.json of the checkpoint: sample 1/0 has 2 .* 1 mask"):
        run(main())


# ---- the buffer filter -----------------------------------------------------------------------------------------------


def waiting_group(group_id: int, length: int) -> WaitingGroup:
    sample = Sample(group_id=group_id, index=0, seed=0, tokens=[1] * (1 + length), prompt_length=1)
    prompt = Prompt(position=group_id, epoch=0, token_ids=[1], text="")
    return WaitingGroup(group=SampleGroup(group_id=group_id, prompt=prompt, samples=[sample]), first_step=0)


def test_a_buffer_filter_chooses_and_the_others_stay(make_run: MakeRun, tmp_path: Path):
    hook = tmp_path / "hook.py"
    hook.write_text("def newest(waiting, num_groups, step):\n    return waiting[-1:]\n")
    cfg = config(make_run, tmp_path, buffer_filter_path=f"{hook}:newest")
    first, second = run(steps(cfg, tmp_path, engine_slow_until(1), 2))
    assert first["rollout/groups_waiting"] == 2
    assert second["rollout/groups_continued"] == 1 and second["rollout/groups_waiting"] >= 1
    assert 4 in dumped(tmp_path, 1) and 1 not in dumped(tmp_path, 1)


@pytest.mark.parametrize("body", ["waiting + waiting", "waiting[0]", "[object()]", "waiting[:1] * 2"])
def test_a_buffer_filter_may_only_choose_among_what_waits(tmp_path: Path, body: str):
    path = tmp_path / "hook.py"
    path.write_text(f"def f(waiting, num_groups, step):\n    return {body}\n")
    choose = load_buffer_filter(f"{path}:f")
    with pytest.raises(HookError, match=r"--buffer-filter-path .* at most 2 of the groups"):
        choose([waiting_group(0, 1), waiting_group(1, 2)], 2, 0)
