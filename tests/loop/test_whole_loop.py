"""The whole loop on a CPU: Ray, router, embedded engines, graders, FSDP2 on gloo, weight updates, evaluation,
checkpoints."""

import pytest

from rlkit.observability.audit import audit
from rlkit.observability.ledger import read_ledger

pytestmark = pytest.mark.loop

ONE = ("--actor-num-gpus-per-node", 1)
TWO = ("--actor-num-gpus-per-node", 2)
LAYOUTS = {
    "colocated 1+1": (*ONE, "--colocate"),
    "colocated 2 ranks, 2 engines": (*TWO, "--colocate"),
    "colocated 2 ranks, 1 engine": (*TWO, "--colocate", "--rollout-num-gpus", 1),
    "split 1+1": (*ONE, "--rollout-num-gpus", 1),
    "split 2+2": (*TWO, "--rollout-num-gpus", 2),
    "split 1+1 through the disk": (*ONE, "--rollout-num-gpus", 1, "--update-weight-transport", "disk"),
}


def test_reward_rises_and_everything_is_left_behind(run_training, task):
    """One rank and one engine taking turns: sixteen steps are enough to prefer digits."""
    run = run_training(
        *LAYOUTS["colocated 1+1"],
        "--num-rollout", 16, "--lr", 1e-2, "--eval-interval", 8, "--eval-prompt-data", "toy", task / "test.jsonl",
        "--eval-temperature", 0, "--save-interval", 8, "--keep-checkpoints", 1,
        "--save-hf", task / "export-{rollout_id}",
        "--check-weight-update-equal",
    )  # fmt: skip
    reward = run.series("rollout/reward")
    assert len(reward) == 16
    assert sum(reward[-3:]) / 3 > sum(reward[:3]) / 3 + 0.2
    assert len(run.series("eval/toy")) == 3
    assert max(run.series("train/train_rollout_logprob_abs_diff")) < 1e-4
    assert all(abs(kl) < 1e-7 for kl in run.series("train/ppo_kl"))
    assert sorted(path.name for path in (run.directory / "checkpoints").glob("iter_*")) == ["iter_0000015"]
    for name in ("config.json", "ledger.jsonl", "metrics.jsonl", "logs/router.log", "logs/engine0.log"):
        assert (run.directory / name).exists(), name

    from transformers import AutoModelForCausalLM, AutoTokenizer

    exported = str(task / "export-15")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(exported), AutoTokenizer.from_pretrained(exported)
    tokens = model.generate(**tokenizer("1 + 1 =", return_tensors="pt"), max_new_tokens=8, do_sample=False)
    assert sum(c.isdigit() for c in tokenizer.decode(tokens[0])[len("1 + 1 =") :].replace(" ", "")) >= 4


COSTLY = ("colocated 2 ranks, 1 engine", "split 2+2")


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in COSTLY else [])
        for name in LAYOUTS
        if name != "colocated 1+1"
    ],
)
def test_layouts_update_every_engine(run_training, layout):
    """Every transport: after each update all engine weights equal the trainer's, byte for byte, and log-probs agree."""
    run = run_training(*LAYOUTS[layout], "--num-rollout", 2, "--check-weight-update-equal")
    assert len(run.series("rollout/reward")) == 2
    assert max(run.series("train/train_rollout_logprob_abs_diff")) < 1e-4
    assert max(run.series("train/train_rollout_logprob_abs_diff_max")) < 1e-3


def test_first_step_does_not_depend_on_ranks_packing_or_micro_batches(run_training, tmp_path):
    """From one recorded rollout: the same loss and gradient norm for any number of ranks and any packing."""
    record = tmp_path / "rollout_{rollout_id}.jsonl"
    first = run_training(
        *LAYOUTS["colocated 1+1"], "--num-rollout", 1, "--save-debug-rollout-data", record, name="record"
    )
    replay = ("--num-rollout", 1, "--load-debug-rollout-data", record)
    variants = {
        "one micro-batch": (*ONE, "--max-tokens-per-gpu", 4096),
        "many micro-batches": (*ONE, "--max-tokens-per-gpu", 40),
        "two ranks": (*TWO, "--max-tokens-per-gpu", 4096),
        "two ranks, small packs": (*TWO, "--max-tokens-per-gpu", 60),
    }
    for name, flags in variants.items():
        run = run_training(*flags, *replay, name=name.replace(" ", "_"))
        for metric in ("train/loss", "train/grad_norm"):
            assert run.series(metric)[0] == pytest.approx(first.series(metric)[0], abs=1e-5, rel=1e-5), (name, metric)


def test_resume_equals_uninterrupted(run_training):
    """Four steps in one go, and two plus two with everything restarted in between, end at the same numbers."""
    flags = (*LAYOUTS["colocated 1+1"], "--save-interval", 2, "--rollout-shuffle")
    whole = run_training(*flags, "--num-rollout", 4, name="whole")
    run_training(*flags, "--num-rollout", 2, name="parts")
    parts = run_training(*flags, "--num-rollout", 4, name="parts")
    assert [row["step"] for row in parts.rows] == [0, 1, 2, 3]
    for metric in ("rollout/reward", "train/loss", "train/grad_norm"):
        assert parts.series(metric) == pytest.approx(whole.series(metric), rel=1e-6), metric
    ledger = audit(read_ledger(parts.directory / "ledger.jsonl"))
    assert (ledger.problems, ledger.retrained) == ([], [])
    assert (ledger.attempts, ledger.num_steps, ledger.num_trained, ledger.num_waiting) == (2, 4, 32, 0)


def test_nothing_left_to_do_is_an_error(run_training):
    from rlkit.types.errors import CheckpointError

    run_training(*LAYOUTS["colocated 1+1"], "--num-rollout", 1)
    with pytest.raises(CheckpointError, match="nothing to do: the next step is 1"):
        run_training(*LAYOUTS["colocated 1+1"], "--num-rollout", 1)
