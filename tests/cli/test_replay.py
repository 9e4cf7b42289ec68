"""What a replay needs, what it names as changed, and how it compares; the replay itself runs in tests/loop."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rlkit.cli.main import main, split_flags
from rlkit.cli.replay import batch_changes, check_rollout, make_plan, with_checkpoints, without_company
from rlkit.cli.replay_verdict import Verdict, compare_rollouts, compare_training
from rlkit.config.load import load_config, to_json
from rlkit.config.rules import check
from rlkit.observability.replay_files import (
    StepRecord,
    batch_path,
    note_start,
    note_tensors,
    read_steps,
    steps_with_batches,
)
from rlkit.observability.report.record import settings_of
from rlkit.rollout.sample_record import record_batch
from rlkit.types.errors import ConfigError, DataError
from rlkit.types.samples import Prompt, Sample, SampleGroup, SampleStatus


def groups(step: int) -> list[SampleGroup]:
    made = []
    for number in (2 * step, 2 * step + 1):
        sample = Sample(
            group_id=number, index=0, seed=number, tokens=[5, 6, 7], prompt_length=2, response="7", loss_mask=[1],
            rollout_logprobs=[-0.5], status=SampleStatus.COMPLETED, reward=1.0, weight_versions=[step],
            label={"set": {1}}, metadata={"answer": [1, None]},
        )  # fmt: skip
        prompt = Prompt(position=number, epoch=0, token_ids=[5, 6], text="2+2", label={"set": {1}})
        made.append(SampleGroup(group_id=number, prompt=prompt, samples=[sample]))
    return made


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Three recorded steps; a checkpoint after step 1, of which only its folder matters here."""
    resolved = load_config(
        ["--hf-checkpoint", "m", "--prompt-data", "p.jsonl", "--rm-type", "random", "--rollout-batch-size", "2",
         "--n-samples-per-prompt", "2", "--num-rollout", "3", "--actor-num-gpus-per-node", "1", "--num-gpus-per-node",
         "1", "--colocate", "--device", "cpu", "--lr", "1e-3"]
    )  # fmt: skip
    document = to_json(resolved)
    (tmp_path / "config.json").write_text(json.dumps(document))
    note_start(tmp_path, 0, before={"model.a": "0"}, settings={i.name: i.value for i in settings_of(document)})
    for step in range(3):
        record_batch(tmp_path, step, groups(step), keep=3)
        note_tensors(tmp_path, step, {"model.a": f"{step + 1}"})
    checkpoint = tmp_path / "checkpoints" / "iter_0000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMPLETE").touch()
    return tmp_path


def test_a_plan_begins_at_the_newest_checkpoint_before_the_step(run_dir: Path):
    plan = make_plan(run_dir, 2, [])
    assert (plan.first_step, plan.checkpoint, plan.changed) == (2, run_dir / "checkpoints" / "iter_0000001", [])
    assert batch_changes(plan) == [] and plan.cfg.optimizer.lr == 1e-3
    check_rollout(plan)
    assert with_checkpoints(plan)[2].before == {"model.a": "2"}
    early = make_plan(run_dir, 1, [])
    assert (early.first_step, early.checkpoint) == (0, None)
    with pytest.raises(DataError, match="needs the weights that step 1 began with"):
        check_rollout(early)


@pytest.mark.parametrize("batches", ["rollout_{rollout_id}.jsonl", None])
def test_the_configuration_of_a_replay_passes_every_rule(run_dir: Path, batches: str | None):
    """Also of a run that evaluates, profiles and exports."""
    flags = ("--eval-interval", "2", "--eval-prompt-data", "toy", "x.jsonl", "--save-hf", "hf-{rollout_id}")
    plan = make_plan(run_dir, 2, [*flags, "--use-pytorch-profiler", "--save-interval", "2", "--async-save"])
    cfg = without_company(plan, run_dir / "again", batches=batches)
    assert check(cfg) == []
    assert cfg.starts_engines == (batches is None) and cfg.checkpoint.save == str(run_dir / "again" / "checkpoints")


def test_changed_flags_are_named_whether_given_or_edited(run_dir: Path):
    assert make_plan(run_dir, 2, ["--lr", "2e-3"]).changed == ["--lr was 0.001 and is 0.002"]
    document = json.loads((run_dir / "config.json").read_text())
    document["optimizer"]["clip_grad"]["value"] = 0.5
    document["rollout"]["num_rollout"]["value"] = 9
    (run_dir / "config.json").write_text(json.dumps(document))
    assert make_plan(run_dir, 2, []).changed == ["--clip-grad was 1.0 and is 0.5"]
    with pytest.raises(ConfigError, match="--learning-rate"):
        make_plan(run_dir, 2, ["--learning-rate", "1"])
    with pytest.raises(ConfigError, match="concerns engines"):
        make_plan(run_dir, 2, ["--sglang-mem-fraction-static", "0.5"])


def test_flags_stand_behind_two_dashes(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    assert split_flags(["run", "--step", "2", "--", "--lr", "1"]) == (["run", "--step", "2"], ["--lr", "1"])
    assert split_flags(["run"]) == (["run"], [])
    assert main(["replay", str(run_dir), "--step", "2", "--", "--learning-rate", "1"]) == 2
    assert "--learning-rate" in capsys.readouterr().err


def test_a_tampered_batch_names_its_group(run_dir: Path):
    path = batch_path(run_dir, 2)
    path.write_text(path.read_text().replace('"rollout_logprobs":[-0.5]', '"rollout_logprobs":[-0.4]', 1))
    assert batch_changes(make_plan(run_dir, 2, [])) == ["step 2: group 4 has other content"]


def test_what_is_missing_is_said_with_the_flags_to_record_it(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    batch_path(run_dir, 2).unlink()
    assert main(["replay", str(run_dir), "--step", "2"]) == 2
    told = capsys.readouterr().err
    assert "those of [2] were not recorded" in told and "--record-for-replay" in told
    assert main(["replay", str(run_dir / "nowhere"), "--step", "2"]) == 2


def test_only_the_newest_batches_are_kept(tmp_path: Path):
    for step in range(5):
        record_batch(tmp_path, step, groups(step), keep=2)
    assert steps_with_batches(tmp_path) == [3, 4] and len(read_steps(tmp_path)) == 5


def row(loss: float = 0.5, norm: float = 1.0) -> dict[str, float]:
    return {"train/loss": loss, "train/grad_norm": norm}


def compared(
    *, rows: dict[int, dict[str, float]] | None = None, before: str = "0", after: tuple[str, str] = ("1", "2")
) -> Verdict:
    recorded = {0: StepRecord(before={"a": "0", "b": "0"}, after={"a": "1"}), 1: StepRecord(after={"a": "2"})}
    found = {0: StepRecord(before={"a": before, "b": "0"}, after={"a": after[0]}), 1: StepRecord(after={"a": after[1]})}
    verdict = Verdict()
    compare_training(
        verdict, steps=range(2), recorded_rows={0: row(), 1: row(0.4)}, rows=rows or {0: row(), 1: row(0.4)},
        recorded=recorded, found=found,
    )  # fmt: skip
    return verdict


def test_all_the_same():
    verdict = compared()
    assert verdict.is_same and verdict.lines()[-1] == "the same, bit for bit"
    assert verdict.compared == [
        "step 0: loss and gradient norm and 1 tensors",
        "step 1: loss and gradient norm and 1 tensors",
    ]


def test_the_first_difference_ends_the_comparison():
    verdict = compared(rows={0: row(norm=1.0000000000000002), 1: row(9.0)}, after=("7", "8"))
    assert verdict.differences == [
        "step 0: train/grad_norm was 1.0 and is 1.0000000000000002",
        "step 0: tensor a was 1 and is 7 (1 of 1 tensors differ)",
    ]
    assert not verdict.is_same and verdict.lines()[-1] == "NOT the same"
    assert compared(before="5").changed_weights == ["tensor a was 0 and is 5 (1 of 2 tensors differ)"]


def test_what_was_not_recorded_is_no_proof():
    verdict = Verdict()
    compare_training(verdict, steps=range(1), recorded_rows={}, rows={}, recorded={}, found={})
    assert len(verdict.notes) == 2 and "not compared" in verdict.notes[0]


def test_the_first_token_that_differs_is_named():
    old = groups(0)
    verdict = Verdict()
    compare_rollouts(verdict, old, groups(0))
    assert verdict.is_same and verdict.compared
    new = groups(0)
    new[1].samples[0] = replace(new[1].samples[0], tokens=[5, 6, 9, 1])
    compare_rollouts(verdict, old, new)
    assert verdict.rollout == ["group 1, sample 0: token 0 of the response was 7 and is 9"]
    verdict = Verdict()
    compare_rollouts(verdict, old, new[:1])
    assert verdict.rollout == ["group 1, sample 0 was not generated again"]
