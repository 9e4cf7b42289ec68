"""Every guard is provoked once, holds back on healthy metrics, and is an error under --strict-guards."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from rlkit.config.schema import ReportConfig, RewardConfig, RolloutConfig, RunConfig
from rlkit.observability.guard_log import FiredGuard, append_guard, read_guards
from rlkit.observability.guards import GAP, GUARDS, REPEAT_EVERY, Guards
from rlkit.rollout.guard_facts import guard_facts
from rlkit.rollout.metrics import rollout_metrics
from rlkit.types.errors import GuardError
from rlkit.types.samples import Prompt, Sample, SampleGroup, SampleStatus

EOS = 1
CFG = RunConfig(reward=RewardConfig(rm_type="deepscaler"))
HEALTHY_TRAINING = {GAP: 1e-5, "train/grad_norm": 0.5}


def sample(
    index: int = 0,
    *,
    reward: float | None = None,
    response: str = "<think>so</think> \\boxed{4}",
    status: SampleStatus = SampleStatus.COMPLETED,
    end: int = EOS,
    mask: int = 1,
    logprobs: tuple[float, ...] = (-0.1, -0.2, -0.3, -0.4),
) -> Sample:
    return Sample(
        group_id=0, index=index, seed=0, tokens=[5, 6, 7, 8, 9, end], prompt_length=2, response=response,
        loss_mask=[mask] * 4, rollout_logprobs=list(logprobs), status=status,
        reward=float(index % 2) if reward is None else reward,
    )  # fmt: skip


def metrics_of(*samples: Sample, prompt: str = "2+2", cfg: RunConfig = CFG, **training: float) -> dict[str, float]:
    group = SampleGroup(
        group_id=0, prompt=Prompt(position=0, epoch=0, token_ids=[5, 6], text=prompt), samples=list(samples)
    )
    return {**rollout_metrics([group], seconds=1.0), **guard_facts(cfg, [group], {EOS}), **training}


def healthy(**training: float) -> dict[str, float]:
    return metrics_of(*(sample(i) for i in range(4)), **{**HEALTHY_TRAINING, **training})


def four(**changes) -> dict[str, float]:
    return metrics_of(*(sample(i, **changes) for i in range(4)), **HEALTHY_TRAINING)


PROVOKED = {
    "all_truncated": (2, four(status=SampleStatus.TRUNCATED), "every one of 4 responses was cut off"),
    "eos_never_sampled": (3, four(end=9), "no response held an end-of-sequence"),
    "constant_reward": (3, four(reward=0.25), "every sample had the reward 0.25"),
    "zero_variance": (3, four(reward=0.0), "nothing is learned"),
    "nothing_selected": (2, four(mask=0), "selects no token of 100%"),
    "grader_never_fires": (2, four(response="<think>so</think> it is 4"), "--rm-type deepscaler looks for"),
    "thinking_never_closed": (2, four(response="<think> hm \\boxed{4}"), "no response held </think>"),
    "placeholder_logprobs": (
        2, metrics_of(*(sample(i, logprobs=(0.0,) * 4) for i in range(4)), **{**HEALTHY_TRAINING, GAP: 0.05}),
        "100% of the responses came with one and the same log-prob",
    ),
    "mismatch": (1, healthy(**{GAP: 0.2}), "differ by 0.2 in the mean"),
    "zero_gradient": (3, healthy(**{"train/grad_norm": 0.0}), "gradient norm was exactly 0"),
}  # fmt: skip


def looked_at(cfg: RunConfig, run_dir: Path, rows: list[dict[str, float]]) -> tuple[list[FiredGuard], list[str]]:
    said: list[str] = []
    guards = Guards(cfg, run_dir, said.append)
    fired = []
    for step, row in enumerate(rows):
        fired += guards.look("rollout", step, row) + guards.look("step", step, row)
    return fired, said


def test_every_guard_is_provoked():
    assert PROVOKED.keys() == {guard.name for guard in GUARDS}


@pytest.mark.parametrize("name", PROVOKED)
def test_a_guard_fires_when_its_evidence_is_complete(name: str, tmp_path: Path):
    steps, row, evidence = PROVOKED[name]
    early, _ = looked_at(CFG, tmp_path, [row] * (steps - 1))
    assert name not in [item.guard for item in early]
    fired, said = looked_at(CFG, tmp_path, [healthy(), *[row] * steps])
    mine = [item for item in fired if item.guard == name]
    assert len(mine) == 1 and mine[0].step == steps and evidence in mine[0].evidence and mine[0].remedy
    assert any(line.startswith(f"guard {name}: ") for line in said)
    assert mine[0] in read_guards(tmp_path / "guards.jsonl")


@pytest.mark.parametrize("name", PROVOKED)
def test_a_strict_guard_is_an_error_that_names_evidence_and_remedy(name: str, tmp_path: Path):
    steps, row, evidence = PROVOKED[name]
    cfg = replace(CFG, report=ReportConfig(strict_guards=True))
    only = tuple(guard for guard in GUARDS if guard.name == name)
    guards = Guards(cfg, tmp_path, print, guards=only)
    for step in range(steps - 1):
        guards.look(only[0].when, step, row)
    with pytest.raises(GuardError, match=re.escape(evidence)):
        guards.look(only[0].when, steps, row)
    assert read_guards(tmp_path / "guards.jsonl")[0].guard == name


def test_healthy_runs_and_interrupted_evidence_are_left_alone(tmp_path: Path):
    rows = [healthy()] * 5
    for steps, row, _ in PROVOKED.values():
        rows += [*[row] * (steps - 1), healthy()]
    assert looked_at(CFG, tmp_path, rows)[0] == []
    assert looked_at(CFG, tmp_path, [{"train/loss": 1.0}] * 5)[0] == []


def test_a_guard_that_still_holds_is_repeated_rarely(tmp_path: Path):
    fired, _ = looked_at(CFG, tmp_path, [healthy(**{GAP: 0.2})] * (REPEAT_EVERY + 2))
    assert [item.step for item in fired] == [0, REPEAT_EVERY]


def test_what_is_meant_is_no_alarm():
    """Timing runs past every end, stop strings, certain policies, graders by row, and prompts that open no thinking."""
    timed = replace(CFG, rollout=RolloutConfig(rollout_ignore_eos=True))
    facts = metrics_of(*(sample(i, end=9) for i in range(4)), cfg=timed)
    assert "rollout/eos_share" not in facts
    truncated = next(guard for guard in GUARDS if guard.name == "all_truncated")
    assert truncated.holds({"rollout/truncated_ratio": 1.0}, timed) is None
    stopped = replace(CFG, rollout=RolloutConfig(rollout_stop=("\n",)))
    assert "rollout/eos_share" not in metrics_of(sample(end=9), cfg=stopped)
    certain = metrics_of(*(sample(i, logprobs=(0.0,) * 4) for i in range(4)), **HEALTHY_TRAINING)
    placeholder = next(guard for guard in GUARDS if guard.name == "placeholder_logprobs")
    assert placeholder.holds(certain, CFG) is False
    exact = RunConfig(reward=RewardConfig(rm_type="exact"))
    assert not {"rollout/answer_found_share", "rollout/closed_thinking_share"} & metrics_of(sample(), cfg=exact).keys()
    opened = metrics_of(sample(response="no end"), cfg=exact, prompt="2+2 <think>\n")
    assert opened["rollout/closed_thinking_share"] == 0.0


def test_older_weights_may_differ(tmp_path: Path):
    rows = [healthy(**{GAP: 0.4, "staleness/max": 1.0})] * 3
    assert looked_at(CFG, tmp_path, rows)[0] == []


def test_a_torn_line_is_left_out(tmp_path: Path):
    append_guard(tmp_path, FiredGuard(step=1, guard="a", evidence="e", remedy="r"))
    path = tmp_path / "guards.jsonl"
    path.write_bytes(path.read_bytes() + b'{"step":2,"gua')
    append_guard(tmp_path, FiredGuard(step=3, guard="b", evidence="e", remedy="r"))
    assert [item.step for item in read_guards(path)] == [1, 3]
