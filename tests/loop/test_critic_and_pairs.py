"""PPO's critic, and learning from given responses, through the whole loop."""

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.loop

PPO = (
    *("--actor-num-gpus-per-node", 2, "--colocate", "--advantage-estimator", "ppo", "--normalize-advantages"),
    *("--critic-lr", 1e-2, "--lambd", 0.95, "--num-critic-only-steps", 1, "--num-steps-per-rollout", 2),
    *("--kl-coef", 0.05, "--kl-loss-type", "k1", "--ref-update-interval", 2, "--save-interval", 2),
)


def test_a_critic_learns_beside_the_policy_and_resumes_exactly(run_training):
    """Two colocated ranks; the second run stops after two steps and continues. The reference moves after the second."""
    whole = run_training(*PPO, "--num-rollout", 4, name="whole")
    run_training(*PPO, "--num-rollout", 2, name="parts")
    parts = run_training(*PPO, "--num-rollout", 4, name="parts")
    assert len(whole.series("critic/loss")) == len(parts.series("critic/loss")) == 4
    assert len(whole.series("train/loss")) == 3, "the policy waits for one step"
    assert whole.series("critic/value_mean")[0] == 0.0 != whole.series("critic/value_mean")[1]
    assert whole.series("train/kl_reward")[1:2] == [0.0], "the reference has just become the policy"
    for name in ("critic/loss", "critic/grad_norm", "critic/value_mean", "train/loss", "train/grad_norm"):
        assert parts.series(name) == whole.series(name), name
    manifest = json.loads((whole.directory / "checkpoints" / "iter_0000003" / "manifest.json").read_text())
    names = manifest["tensors"]
    assert {"critic.model.score.weight", "critic.exp_avg.score.weight"} <= names.keys()
    assert any(name.startswith("reference.model.") for name in names)
    other = json.loads((parts.directory / "checkpoints" / "iter_0000003" / "manifest.json").read_text())
    assert names == other["tensors"]


@pytest.mark.slow
def test_dpo_prefers_what_was_chosen(run_training, tmp_path: Path):
    rows = [{"input": f"{n} ?", "chosen": "yes", "rejected": "no"} for n in range(32)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = run_training(
        *("--loss-type", "dpo_loss", "--prompt-data", path, "--n-samples-per-prompt", 2, "--num-rollout", 8),
        *("--actor-num-gpus-per-node", 2, "--colocate", "--dpo-beta", 0.5),
        without=("--label-key", "--custom-rm-path"),
    )
    assert run.series("train/loss")[0] == pytest.approx(0.6931, abs=1e-3)
    assert run.series("train/dpo_accuracy")[-1] == 1.0
    assert run.series("train/dpo_margin")[-1] > 0.5
    assert run.series("train/dpo_chosen_reward")[-1] > run.series("train/dpo_rejected_reward")[-1]


@pytest.mark.slow
def test_sft_on_whole_conversations(run_training, tmp_path: Path, tiny_model: Path):
    """The tiny tokenizer has no chat template: one is written beside it."""
    import shutil

    from transformers import AutoTokenizer

    model = tmp_path / "with_template"
    shutil.copytree(tiny_model, model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'][0] }}={{ m['content'] }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}a={% endif %}"
    )
    tokenizer.save_pretrained(model)
    turns = [("user", "1 + 1"), ("assistant", "2"), ("user", "and 2"), ("assistant", "4")]
    row = {"messages": [{"role": role, "content": text} for role, text in turns]}
    path = tmp_path / "conversations.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for _ in range(16)))
    run = run_training(
        *("--hf-checkpoint", model, "--loss-type", "sft_loss", "--prompt-data", path, "--input-key", "messages"),
        *("--apply-chat-template", "--n-samples-per-prompt", 1, "--num-rollout", 6, "--lr", 1e-2, "--colocate"),
        *("--actor-num-gpus-per-node", 1),
        without=("--label-key", "--custom-rm-path"),
    )
    assert run.series("train/num_tokens")[0] == 8 * 4, "two answers of one digit, and their ends"
    assert run.series("train/loss")[-1] < 0.5 * run.series("train/loss")[0]
