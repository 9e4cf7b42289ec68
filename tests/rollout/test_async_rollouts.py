"""Rollouts that begin before the step before them is trained, and a pool that never stops: what a checkpoint holds, and
that the ledger of a run that is killed and continued proves it."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_engine_server import FakeEngine
from managed_rollouts import calculator, managed

from rlkit.config.schema import RunConfig
from rlkit.observability.audit import audit
from rlkit.observability.ledger import Ledger, LedgerEvent, read_ledger
from rlkit.orchestration.checkpoints import Checkpoint, CheckpointMeta
from rlkit.orchestration.resuming import check_ledger, note_end, write_saved, write_start
from rlkit.rollout.manager import RolloutManager

MakeRun = Callable[..., RunConfig]
DATA = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "rollout_max_response_len": 16}


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, timeout=60))


def problems(run_dir: Path) -> list[str]:
    return audit(read_ledger(run_dir / "ledger.jsonl")).problems


def events(run_dir: Path, event: LedgerEvent) -> list[dict[str, Any]]:
    return [record.fields for record in read_ledger(run_dir / "ledger.jsonl") if record.event is event]


class Driver:
    """The part of a session that the ledger and the checkpoints see."""

    def __init__(self, cfg: RunConfig, run_dir: Path, engine: FakeEngine, manager: RolloutManager) -> None:
        self.cfg, self.run_dir, self.engine, self.manager = cfg, run_dir, engine, manager
        self.ledger = Ledger(run_dir / "ledger.jsonl")

    def begin(self, checkpoint: Checkpoint | None) -> int:
        step = 0 if checkpoint is None else checkpoint.meta.step + 1
        write_start(self.ledger, self.cfg, checkpoint, step)
        if checkpoint is not None:
            self.manager.load_state(checkpoint.rollout_state)
        self.update(step)
        return step

    def save(self, step: int) -> Checkpoint:
        """What a checkpoint after `step` holds, through JSON."""
        state = json.loads(json.dumps(self.manager.state(step)))
        path = self.run_dir / f"iter_{step}"
        meta = CheckpointMeta(step=step, weight_version=step + 1, world_size=1)
        write_saved(self.ledger, meta, path, state)
        return Checkpoint(path=path, meta=meta, rollout_state=state)

    def update(self, version: int) -> None:
        self.engine.weight_version = version
        self.manager.set_engine_version(version)


@asynccontextmanager
async def killed_at_the_end(cfg: RunConfig, run_dir: Path, engine: FakeEngine) -> AsyncIterator[Driver]:
    """The ledger stays as it is when the block ends: a killed process writes nothing more."""
    path = run_dir / "ledger.jsonl"
    async with managed(cfg, run_dir, engine) as manager:
        yield Driver(cfg, run_dir, engine, manager)
        written = path.read_bytes()
    path.write_bytes(written)


def test_a_rollout_in_flight_at_a_save_is_issued_again(make_run: MakeRun, tmp_path: Path):
    cfg = make_run(rollout=DATA, async_training={"async_mode": "one-step"})
    engine = FakeEngine(speech=calculator())

    async def first() -> Checkpoint:
        async with killed_at_the_end(cfg, tmp_path, engine) as driver:
            manager = driver.manager
            driver.begin(None)
            await manager.generate(0)
            ahead = asyncio.create_task(manager.generate(1))
            await ahead  # packed, its groups kept, before step 0 has trained
            manager.record_trained(0)
            checkpoint = driver.save(0)
            assert checkpoint.rollout_state["next_group_id"] == 2, "as if the rollout had not begun"
            driver.update(1)
            await asyncio.create_task(manager.generate(2))
            manager.record_trained(1)
            return checkpoint

    async def second(checkpoint: Checkpoint) -> None:
        async with managed(cfg, tmp_path, engine) as manager:
            driver = Driver(cfg, tmp_path, engine, manager)
            assert driver.begin(checkpoint) == 1
            await manager.generate(1)
            manager.record_trained(1)
            assert driver.save(1).rollout_state["next_group_id"] == 4
            note_end(driver.ledger, None, next_step=2)

    checkpoint = run(first())
    assert problems(tmp_path) == []
    check_ledger(tmp_path / "ledger.jsonl", checkpoint)
    run(second(checkpoint))
    assert problems(tmp_path) == []
    issued = [(e["group"], e["position"], e["seeds"]) for e in events(tmp_path, LedgerEvent.ISSUED)]
    assert issued[2:4] == issued[6:8] and [group for group, _, _ in issued] == [0, 1, 2, 3, 4, 5, 2, 3]
    staleness = [event["staleness"] for event in events(tmp_path, LedgerEvent.KEPT)]
    assert staleness == [[0, 0]] * 2 + [[1, 1]] * 4 + [[0, 0]] * 2


@pytest.mark.parametrize("kept", ["finished_group_is_kept", "dropped_group_stays_dropped"])
def test_a_pool_is_continued_after_a_kill(make_run: MakeRun, tmp_path: Path, kept: str):
    """Saved after step 0 with groups 2 to 5 in the pool, killed during step 1, continued: every group once."""
    has_filter = kept == "dropped_group_stays_dropped"
    hook = tmp_path / "hook.py"
    hook.write_text("def even(group):\n    return group.group_id % 2 == 0\n")
    cfg = make_run(
        rollout={**DATA, **({"dynamic_sampling_filter_path": f"{hook}:even"} if has_filter else {})},
        async_training={"async_mode": "full", "max_staleness": 2},
    )
    engine = FakeEngine(speech=calculator())

    async def first() -> Checkpoint:
        async with killed_at_the_end(cfg, tmp_path, engine) as driver:
            manager = driver.manager
            driver.begin(None)
            await manager.generate(0)
            await asyncio.sleep(0.3)  # the pool fills
            manager.record_trained(0)
            checkpoint = driver.save(0)
            driver.update(1)
            await manager.generate(1)
            manager.record_trained(1)
            driver.update(2)
            await manager.generate(2)
            return checkpoint

    async def second(checkpoint: Checkpoint) -> None:
        async with managed(cfg, tmp_path, engine) as manager:
            driver = Driver(cfg, tmp_path, engine, manager)
            for step in range(driver.begin(checkpoint), 4):
                batch = await manager.generate(step)
                assert batch.metrics["staleness/max"] <= 2
                manager.record_trained(step)
                driver.update(step + 1)
        note_end(driver.ledger, None, next_step=4)

    checkpoint = run(first())
    assert problems(tmp_path) == [], "also before it is continued"
    check_ledger(tmp_path / "ledger.jsonl", checkpoint)
    waiting = [item["group"] for item in checkpoint.rollout_state["waiting"]]
    finished = [g["group_id"] for g in waiting if all(s["status"] == "completed" for s in g["samples"])]
    assert len(finished) >= 2
    num_requests = len(engine.requests)
    run(second(checkpoint))
    report = audit(read_ledger(tmp_path / "ledger.jsonl"))
    assert report.problems == [] and report.num_trained == 8 and report.attempts == 2
    asked = {json.dumps(body["input_ids"]) + str(body["sampling_params"]["sampling_seed"]) for body in engine.requests}
    again = [
        json.dumps(b["input_ids"]) + str(b["sampling_params"]["sampling_seed"]) for b in engine.requests[num_requests:]
    ]
    of_finished = {
        json.dumps(s["tokens"][: s["prompt_length"]]) + str(s["seed"])
        for g in waiting if g["group_id"] in finished for s in g["samples"]
    }  # fmt: skip
    assert of_finished <= asked and not of_finished & set(again), "finished responses are not generated twice"
    if has_filter:
        assert report.drop_reasons.keys() == {"filtered"}
        trained = {group for event in events(tmp_path, LedgerEvent.TRAINED) for group in event["groups"]}
        assert all(group % 2 == 0 for group in trained)


def test_a_checkpoint_of_a_pool_serves_a_run_that_takes_turns(make_run: MakeRun, tmp_path: Path):
    engine = FakeEngine(speech=calculator())
    full = make_run(rollout=DATA, async_training={"async_mode": "full", "max_staleness": 1})

    async def first() -> dict[str, Any]:
        async with managed(full, tmp_path, engine) as manager:
            await manager.generate(0)
            await asyncio.sleep(0.2)
            manager.record_trained(0)
            return json.loads(json.dumps(manager.state(0)))

    async def second(state: dict[str, Any]) -> None:
        async with managed(make_run(rollout=DATA), tmp_path, engine) as manager:
            manager.load_state(state)
            engine.weight_version = 1
            await manager.generate(1)
            manager.record_trained(1)

    run(second(run(first())))
    trained = [event["groups"] for event in events(tmp_path, LedgerEvent.TRAINED)]
    assert sorted(group for groups in trained for group in groups) == [0, 1, 2, 3]
    versions = [e["versions"] for e in events(tmp_path, LedgerEvent.GENERATED) if e["step"] == 1]
    assert versions == [[[1], [1]]] * 2, "started anew: taking turns, every sample is of the newest weights"


def test_an_end_of_the_run_tells_what_is_left(make_run: MakeRun, tmp_path: Path):
    engine = FakeEngine(speech=calculator())
    cfg = make_run(rollout=DATA, async_training={"async_mode": "full", "max_staleness": 1})

    async def main() -> None:
        async with managed(cfg, tmp_path, engine) as manager:
            driver = Driver(cfg, tmp_path, engine, manager)
            driver.begin(None)
            await manager.generate(0)
            manager.record_trained(0)
        note_end(driver.ledger, None, next_step=1)

    run(main())
    assert problems(tmp_path) == []
    assert {event["reason"] for event in events(tmp_path, LedgerEvent.BUFFERED)} == {"run_ended"}
    report = audit(read_ledger(tmp_path / "ledger.jsonl"))
    assert report.is_finished and report.num_waiting == len(events(tmp_path, LedgerEvent.BUFFERED)) == 2
