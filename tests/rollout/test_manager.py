import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_engine_server import EOS, FakeEngine
from managed_rollouts import calculator, managed, spell

import rlkit.rollout.generator as generator_module
from rlkit.algo.advantages import group_advantages
from rlkit.config.schema import RunConfig
from rlkit.observability.ledger import LedgerEvent, read_ledger
from rlkit.observability.spans import Spans
from rlkit.rewards.pool import GradeResult, GraderPool
from rlkit.rollout.debug_data import load_rollout
from rlkit.rollout.manager import RolloutBatch
from rlkit.types.batches import PackedBatch
from rlkit.types.errors import ConfigError, DataError, EngineError, RewardError
from rlkit.types.samples import Sample

MakeRun = Callable[..., RunConfig]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(generator_module, "FIRST_BACKOFF_S", 0.001)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, timeout=60))


def batches(batch: RolloutBatch) -> list[PackedBatch]:
    return [packed for updates in batch.shards for update in updates for packed in update.micro_batches]


def events(run_dir: Path, event: LedgerEvent) -> list[dict[str, Any]]:
    return [record.fields for record in read_ledger(run_dir / "ledger.jsonl") if record.event is event]


async def rollouts(cfg: RunConfig, run_dir: Path, engine: FakeEngine, *, steps: range, state: Any = None, dp: int = 1):
    async with managed(cfg, run_dir, engine, dp=dp) as manager:
        if state is not None:
            manager.load_state(state)
        made = [await manager.generate(step) for step in steps]
        return made, manager.state()


# ---- a rollout -------------------------------------------------------------------------------------------------------


def test_a_rollout_reaches_the_ranks_with_the_advantages_of_its_rewards(make_run: MakeRun, tmp_path: Path):
    path = tmp_path / "r_{rollout_id}.jsonl"
    cfg = make_run(debug={"save_debug_rollout_data": str(path)})
    (batch,), _ = run(rollouts(cfg, tmp_path, FakeEngine(speech=calculator()), steps=range(5, 6), dp=2))

    step, groups = load_rollout(tmp_path / "r_5.jsonl")
    samples = [sample for group in groups for sample in group.samples]
    assert step == 5 and [len(group.samples) for group in groups] == [3] * 4
    assert [s.reward for s in samples] == [float(s.response == s.label) for s in samples]
    assert 0 < sum(s.reward or 0 for s in samples) < 12, "the fake engine must be right sometimes and wrong sometimes"

    advantages = group_advantages([s.reward for s in samples], [s.group_id for s in samples], divide_by_std=True)
    assert len(batch.shards) == 2
    seen: list[int] = []
    for packed in batches(batch):
        for place, position in enumerate(packed.sample_ids_S.tolist()):
            sample = samples[position]
            start, end = packed.cu_seqlens[place].item(), packed.cu_seqlens[place + 1].item()
            assert packed.tokens_T[start:end].tolist() == sample.tokens
            assert packed.loss_mask_T[start:end].sum().item() == sample.response_length
            assert packed.advantages_S[place].item() == pytest.approx(advantages[position])
            seen.append(position)
    assert sorted(seen) == list(range(12))
    assert batch.metrics["rollout/reward"] == pytest.approx(sum(s.reward or 0 for s in samples) / 12)
    assert batch.metrics["grader/graded"] == 12


def test_the_ledger_tells_the_story_of_every_group(make_run: MakeRun, tmp_path: Path):
    async def main() -> None:
        async with managed(make_run(), tmp_path, FakeEngine(speech=calculator()), dp=2) as manager:
            for step in range(3):
                await manager.generate(step)
                manager.record_trained(step)

    run(main())
    issued = events(tmp_path, LedgerEvent.ISSUED)
    assert [(e["step"], e["group"]) for e in issued] == [(group // 4, group) for group in range(12)]
    assert [(e["epoch"], e["position"]) for e in issued] == [(0, row) for row in range(10)] + [(1, 0), (1, 1)]
    for event in (LedgerEvent.GENERATED, LedgerEvent.GRADED, LedgerEvent.KEPT):
        assert sorted(e["group"] for e in events(tmp_path, event)) == list(range(12)), event
    assert events(tmp_path, LedgerEvent.DROPPED) == []
    for step in range(3):
        trained = [e for e in events(tmp_path, LedgerEvent.TRAINED) if e["step"] == step]
        assert [e["rank"] for e in trained] == [0, 1]
        assert {group for e in trained for group in e["groups"]} == set(range(4 * step, 4 * step + 4))
    generated = events(tmp_path, LedgerEvent.GENERATED)[0]
    assert generated["status"] == ["completed"] * 3 and generated["versions"] == [[0]] * 3
    order = [r.event for r in read_ledger(tmp_path / "ledger.jsonl") if r.fields.get("group") == 2]
    assert order == [LedgerEvent.ISSUED, LedgerEvent.GENERATED, LedgerEvent.GRADED, LedgerEvent.KEPT]


def test_spans_and_progress_are_reported(make_run: MakeRun, tmp_path: Path):
    spans = Spans()
    progress: list[tuple[int, int]] = []

    async def main() -> None:
        engine = FakeEngine(speech=calculator())
        engine.hang_s = 0.05
        async with managed(
            make_run(), tmp_path, engine, spans=spans, on_progress=lambda *where: progress.append(where)
        ) as manager:
            await manager.generate(0)

    run(main())
    totals = spans.drain()
    assert totals["time/generate_s"] >= 0.05 and totals.keys() >= {"time/grade_s", "time/pack_s"}
    assert progress == [(done, 12) for done in range(13)]


def test_resuming_from_the_state_continues_as_if_never_stopped(make_run: MakeRun, tmp_path: Path):
    cfg = make_run(data={"rollout_shuffle": True})
    engine = FakeEngine(speech=calculator())
    whole, end = run(rollouts(cfg, tmp_path / "a", engine, steps=range(4)))
    first, state = run(rollouts(cfg, tmp_path / "b", engine, steps=range(2)))
    state = json.loads(json.dumps(state))
    second, end_again = run(rollouts(cfg, tmp_path / "b", engine, steps=range(2, 4), state=state))
    assert end_again == end
    for expected, got in zip(whole, [*first, *second], strict=True):
        assert_same_shards(expected, got)


def assert_same_shards(a: RolloutBatch, b: RolloutBatch) -> None:
    assert len(batches(a)) == len(batches(b)) > 0
    for left, right in zip(batches(a), batches(b), strict=True):
        for name in PackedBatch.__slots__:
            x, y = getattr(left, name), getattr(right, name)
            assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y, name


# ---- other sources of samples ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dp", [1, 2])
def test_a_replayed_rollout_gives_the_same_shards_without_engines(make_run: MakeRun, tmp_path: Path, dp: int):
    path = str(tmp_path / "r_{rollout_id}.jsonl")
    engine = FakeEngine(speech=calculator())
    made, _ = run(
        rollouts(make_run(debug={"save_debug_rollout_data": path}), tmp_path / "a", engine, steps=range(2), dp=dp)
    )

    async def replay() -> list[RolloutBatch]:
        cfg = make_run(debug={"load_debug_rollout_data": path})
        async with managed(cfg, tmp_path / "b", dp=dp) as manager:
            assert await manager.evaluate(0) == {}
            return [await manager.generate(step) for step in range(2)]

    for expected, got in zip(made, run(replay()), strict=True):
        assert_same_shards(expected, got)
        assert got.metrics["rollout/reward"] == expected.metrics["rollout/reward"]


def test_sft_trains_on_labels_without_engines(make_run: MakeRun, tmp_path: Path):
    cfg = make_run(algo={"loss_type": "sft_loss"}, rollout={"n_samples_per_prompt": 1})

    async def main() -> RolloutBatch:
        async with managed(cfg, tmp_path, dp=1) as manager:
            return await manager.generate(0)

    batch = run(main())
    packed = batches(batch)
    assert sum(p.num_sequences for p in packed) == 4
    for p in packed:
        assert p.rollout_logp_T is None and p.advantages_S.tolist() == [1.0] * p.num_sequences
        trained = p.tokens_T[p.loss_mask_T].tolist()
        assert trained.count(EOS) == p.num_sequences
    assert batch.metrics["rollout/response_length"] == 2.0  # one digit (0+0 to 3+3) and the end of the turn
    assert "rollout/reward" not in batch.metrics
    assert [e["group"] for e in events(tmp_path, LedgerEvent.KEPT)] == [0, 1, 2, 3]


def test_a_run_that_only_evaluates_needs_no_prompt_file(make_run: MakeRun, prompt_file: Path, tmp_path: Path):
    cfg = make_run(
        data={"prompt_data": None},
        rollout={"num_rollout": 0},
        evaluation={"eval_interval": 1, "eval_prompt_data": ("sums", str(prompt_file))},
    )

    async def main() -> dict[str, float]:
        async with managed(cfg, tmp_path, FakeEngine(speech=calculator(right=lambda seed: True))) as manager:
            return await manager.evaluate(0)

    assert run(main())["eval/sums"] == 1.0


def test_dpo_trains_on_pairs_without_engines(make_run: MakeRun, tmp_path: Path):
    rows = [{"input": f"{a}+1=", "chosen": str(a + 1), "rejected": str(a + 12)} for a in range(6)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = make_run(
        algo={"loss_type": "dpo_loss"},
        data={"prompt_data": str(path), "label_key": None},
        rollout={"n_samples_per_prompt": 2},
        train={"max_tokens_per_gpu": 16},
    )

    async def main() -> list[RolloutBatch]:
        async with managed(cfg, tmp_path, dp=2) as manager:
            return [await manager.generate(step) for step in range(2)]

    made = run(main())
    for batch in made:
        packed = batches(batch)
        assert sum(p.num_sequences for p in packed) == 8
        for p in packed:
            assert p.advantages_S.tolist() == [1.0, -1.0] * (p.num_sequences // 2)
            assert all(first + 1 == second for first, second in p.sample_ids_S.view(-1, 2).tolist())
    (first,) = (p for p in batches(made[0]) if 0 in p.sample_ids_S.tolist())
    where = first.sample_ids_S.tolist().index(0)
    bounds = first.cu_seqlens.tolist()
    texts = [spell(first.tokens_T[bounds[n] : bounds[n + 1]].tolist()) for n in (where, where + 1)]
    assert texts == ["0+1=1", "0+1=12"]
    assert [e["group"] for e in events(tmp_path, LedgerEvent.KEPT)] == list(range(8))


def test_given_responses_that_do_not_fit_are_left_out_as_pairs(make_run: MakeRun, tmp_path: Path):
    """Never cut: `0+1=` and five digits are one token too many, with the end of the turn."""
    rows = [{"input": "0+1=", "chosen": "1", "rejected": "2" * (5 if n == 1 else 4)} for n in range(4)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = make_run(
        algo={"loss_type": "dpo_loss"},
        data={"prompt_data": str(path), "label_key": None},
        rollout={"n_samples_per_prompt": 2, "rollout_max_context_len": 9},
    )

    async def main() -> RolloutBatch:
        async with managed(cfg, tmp_path, dp=1) as manager:
            return await manager.generate(0)

    ids = [i for p in batches(run(main())) for i in p.sample_ids_S.tolist()]
    assert sorted(ids) == [0, 1, 4, 5, 6, 7]
    (dropped,) = events(tmp_path, LedgerEvent.DROPPED)
    assert (dropped["group"], dropped["reason"]) == (1, "too_long")


# ---- what cannot be trained on ---------------------------------------------------------------------------------------

PARTLY_BROKEN = """
def reward(response, label, metadata):
    if response == label:
        return {"score": 1.0, "why": "equal"}
    if metadata.get("never"):
        return {"score": None}
    return {"score": 0.25, "why": "different"}
"""


def custom_reward(tmp_path: Path, source: str, **more: Any) -> dict[str, Any]:
    path = tmp_path / "reward.py"
    path.write_text(source)
    return {"rm_type": None, "custom_rm_path": f"{path}:reward", "rm_num_workers": 1, **more}


def test_unscored_samples_are_left_out_and_named(make_run: MakeRun, tmp_path: Path, prompt_file: Path):
    rows = [json.loads(line) for line in prompt_file.read_text().splitlines()]
    rows[1]["metadata"] = {"never": True}
    prompt_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dump = str(tmp_path / "r.jsonl")
    cfg = make_run(
        reward=custom_reward(tmp_path, PARTLY_BROKEN, reward_key="score"), debug={"save_debug_rollout_data": dump}
    )
    (batch,), _ = run(rollouts(cfg, tmp_path, FakeEngine(speech=calculator(right=lambda seed: False)), steps=range(1)))
    assert batch.metrics["rollout/unscored"] == 3 and batch.metrics["rollout/reward"] == 0.25
    assert batch.metrics["rollout/zero_variance_share"] == 1.0
    assert sorted(i for p in batches(batch) for i in p.sample_ids_S.tolist()) == [0, 1, 2, 6, 7, 8, 9, 10, 11]
    (dropped,) = events(tmp_path, LedgerEvent.DROPPED)
    assert (dropped["group"], dropped["reason"]) == (1, "unscored") and "indices" not in dropped
    assert load_rollout(Path(dump))[1][0].samples[0].reward_detail == {"score": 0.25, "why": "different"}


def test_nothing_scored_is_an_error_with_the_graders_words_and_an_example(make_run: MakeRun, tmp_path: Path):
    source = "def reward(response, label, metadata):\n    raise KeyError('no such tool')\n"
    cfg = make_run(reward=custom_reward(tmp_path, source))
    with pytest.raises(RewardError) as caught:
        run(rollouts(cfg, tmp_path, FakeEngine(speech=calculator()), steps=range(3, 4)))
    message = str(caught.value)
    assert message.startswith("step 3: none of 12 samples can be trained on (12 unscored)")
    assert "no such tool" in message and "Example response: '" in message and "--custom-rm-path" in message
    assert len(events(tmp_path, LedgerEvent.DROPPED)) == 4


def test_dead_engines_are_an_error_with_the_engines_words(make_run: MakeRun, tmp_path: Path):
    engine = FakeEngine()
    engine.failures = [500] * 1000
    with pytest.raises(EngineError, match=r"12 failed.*told to fail"):
        run(rollouts(make_run(), tmp_path, engine, steps=range(1)))


def test_prompts_without_room_are_an_error_that_names_the_flags(make_run: MakeRun, tmp_path: Path):
    cfg = make_run(rollout={"rollout_max_context_len": 4})
    with pytest.raises(DataError, match=r"12 no_room.*up to 4 tokens.*--rollout-max-context-len"):
        run(rollouts(cfg, tmp_path, FakeEngine(), steps=range(1)))


def test_a_few_failed_samples_cost_only_themselves(make_run: MakeRun, tmp_path: Path):
    engine = FakeEngine(speech=calculator())
    cfg = make_run(engine={"sglang_server_concurrency": 1})
    engine.failures = [500] * generator_module.MAX_ATTEMPTS
    # one request at a time: the waiting ones queue in front of a retry, so five failures hit five samples once each
    (batch,), _ = run(rollouts(cfg, tmp_path, engine, steps=range(1)))
    assert batch.metrics["rollout/reissued"] == generator_module.MAX_ATTEMPTS
    assert batch.metrics["rollout/failed"] == 0
    assert sum(e.get("reissued", 0) for e in events(tmp_path, LedgerEvent.GENERATED)) == generator_module.MAX_ATTEMPTS


def test_a_broken_reward_function_is_said_before_anything_is_generated(make_run: MakeRun, tmp_path: Path):
    engine = FakeEngine()
    cfg = make_run(reward=custom_reward(tmp_path, "def other(): pass\n"))
    with pytest.raises(ConfigError, match="custom-rm-path"):
        run(rollouts(cfg, tmp_path, engine, steps=range(1)))
    assert engine.requests == []


def test_an_error_of_the_run_stops_generation_and_the_engines(make_run: MakeRun, tmp_path: Path):
    """The grader returns a dict and no --reward-key says which value counts: wrong for every sample."""
    engine = FakeEngine(speech=calculator())
    engine.hang_s = 0.2  # one at a time: the first grade is back long before the last request

    async def main() -> None:
        cfg = make_run(reward=custom_reward(tmp_path, PARTLY_BROKEN), engine={"sglang_server_concurrency": 1})
        async with managed(cfg, tmp_path, engine) as manager:
            with pytest.raises(RewardError, match="--reward-key"):
                await manager.generate(0)
            going_on = [
                task for task in asyncio.all_tasks() if "sample" in getattr(task.get_coro(), "__qualname__", "")
            ]
            assert going_on == []

    run(main())
    assert engine.aborts[0] == {"rid": "", "abort_all": True}
    assert len(engine.requests) < 12


# ---- evaluation ------------------------------------------------------------------------------------------------------


def eval_section(tmp_path: Path, **more: Any) -> dict[str, Any]:
    for name, numbers in (("small", range(4)), ("large", range(20, 26))):
        rows = [{"input": f"{a}+{a}=", "label": str(2 * a)} for a in numbers]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = ("small", str(tmp_path / "small.jsonl"), "large", f"{tmp_path / 'large.jsonl'}@[1:]")
    return {"eval_interval": 1, "eval_prompt_data": pairs, **more}


async def evaluation(cfg: RunConfig, run_dir: Path, engine: FakeEngine) -> dict[str, float]:
    async with managed(cfg, run_dir, engine) as manager:
        return await manager.evaluate(0)


def test_evaluation_scores_each_data_set_with_its_own_sampling(make_run: MakeRun, tmp_path: Path):
    engine = FakeEngine(speech=lambda body: calculator(right=lambda seed: len(body["input_ids"]) == 4)(body))
    cfg = make_run(evaluation=eval_section(tmp_path, eval_temperature=0.0, eval_max_response_len=2))
    metrics = run(evaluation(cfg, tmp_path, engine))
    assert metrics["eval/small"] == 1.0 and metrics["eval/large"] == 0.0
    assert metrics["eval/small/num_samples"] == 4 and metrics["eval/large/num_samples"] == 5
    assert metrics["eval/small/truncated_ratio"] == 0.0 and metrics["eval/large/truncated_ratio"] == 1.0
    assert metrics["eval/large/response_length"] == 2.0
    assert not any("pass@" in name for name in metrics)
    assert all(r["sampling_params"]["temperature"] == 0.0 for r in engine.requests)
    assert list(read_ledger(tmp_path / "ledger.jsonl")) == []


def test_evaluation_repeats_its_seeds_and_estimates_pass_at_k(make_run: MakeRun, tmp_path: Path):
    section = eval_section(tmp_path, n_samples_per_eval_prompt=5)
    cfg = make_run(evaluation=section)
    engine = FakeEngine(speech=calculator())

    async def twice() -> tuple[dict[str, float], dict[str, float]]:
        async with managed(cfg, tmp_path, engine) as manager:
            return await manager.evaluate(0), await manager.evaluate(7)

    first, second = run(twice())
    assert first == second
    assert {name for name in first if "small/pass" in name} == {f"eval/small/pass@{k}" for k in (1, 2, 4)}
    assert first["eval/small/pass@1"] == pytest.approx(first["eval/small"])
    assert first["eval/small/pass@1"] < first["eval/small/pass@2"] < first["eval/small/pass@4"]
    seeds = [body["sampling_params"]["sampling_seed"] for body in engine.requests]
    assert len(set(seeds)) == 5 * (4 + 5) and len(seeds) == 2 * len(set(seeds))


def test_unscored_evaluation_samples_are_counted_not_zeroed(make_run: MakeRun, tmp_path: Path):
    source = "def reward(response, label, metadata):\n    return 1.0 if int(label) % 4 == 0 else None\n"
    cfg = make_run(evaluation=eval_section(tmp_path), reward=custom_reward(tmp_path, source))
    metrics = run(evaluation(cfg, tmp_path, FakeEngine(speech=calculator())))
    assert metrics["eval/small"] == 1.0 and metrics["eval/small/unscored"] == 2


def test_an_evaluation_without_any_score_is_an_error(make_run: MakeRun, tmp_path: Path):
    source = "def reward(response, label, metadata):\n    return None\n"
    cfg = make_run(evaluation=eval_section(tmp_path), reward=custom_reward(tmp_path, source))
    with pytest.raises(RewardError, match=r"evaluation set small: none of 4 samples .*4 completed.*None"):
        run(evaluation(cfg, tmp_path, FakeEngine(speech=calculator())))


@pytest.mark.parametrize(
    ("pairs", "message"),
    [(("a", "x", "b"), "'b' has no path"), (("a", "x", "a", "y"), "given twice")],
    ids=["dangling", "twice"],
)
def test_malformed_eval_pairs_are_refused(make_run: MakeRun, tmp_path: Path, pairs: tuple[str, ...], message: str):
    cfg = make_run(evaluation={"eval_interval": 1, "eval_prompt_data": pairs})
    with pytest.raises(ConfigError, match=message):
        run(evaluation(cfg, tmp_path, FakeEngine()))


# ---- overlap ---------------------------------------------------------------------------------------------------------


def test_grading_starts_while_other_samples_still_generate(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class SlowStart(FakeEngine):
        """Answers its first request last."""

        async def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
            if len(self.requests) == 1:
                while len(graded) < 11:
                    await asyncio.sleep(0.005)
            return await super()._answer(body)

    engine = SlowStart(speech=calculator())
    graded: list[int] = []
    grade = GraderPool.grade

    async def recorded(pool: GraderPool, sample: Sample, **options: Any) -> GradeResult:
        graded.append(engine.num_running)
        return await grade(pool, sample, **options)

    monkeypatch.setattr(GraderPool, "grade", recorded)
    run(rollouts(make_run(), tmp_path, engine, steps=range(1)))
    assert len(graded) == 12 and all(running >= 1 for running in graded[:11])
