"""The tool that trains with every algorithm: its flags are right, and its table says what was measured."""

import json
from dataclasses import asdict
from pathlib import Path

import learning_curves
import pytest
from learning_curves import RECIPES, SUPERVISED, Result, sparkline, table
from make_pairs import write_pairs

from rlkit.config.load import load_config


def flags_of(name: str) -> list[str]:
    rest = [] if name in SUPERVISED else ["--label-key", "label", "--rm-type", "exact"]
    basics = ["--hf-checkpoint", "m", "--prompt-data", "p.jsonl", "--input-key", "prompt", "--apply-chat-template"]
    size = ["--rollout-batch-size", "64", "--num-rollout", str(RECIPES[name].num_steps)]
    return [*basics, *size, *RECIPES[name].flags, *rest, *learning_curves.PLACE]


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_a_run(name: str):
    """Accepted by all rules; the algorithm is the one it is called by."""
    cfg = load_config(flags_of(name)).config
    expected = {"sft": cfg.is_sft, "dpo": cfg.is_dpo, "ppo": cfg.needs_critic}
    assert expected.get(name, cfg.algo.advantage_estimator == name)


def test_a_rejected_sum_lacks_its_carry(tmp_path: Path):
    prompts = tmp_path / "train.jsonl"
    prompts.write_text(json.dumps({"prompt": [{"role": "user", "content": "37+58"}], "label": "95"}) + "\n")
    assert write_pairs(prompts, tmp_path / "pairs.jsonl") == 1
    (pair,) = (tmp_path / "pairs.jsonl").read_text().splitlines()
    assert json.loads(pair) == {
        "prompt": [{"role": "user", "content": "37+58"}],
        "chosen": "95",
        "rejected": "85",
    }


def test_a_sparkline_spans_its_values():
    assert sparkline([0.0, 1.0]) == "▁█"
    assert sparkline([3.0, 3.0, 3.0]) == "▁▁▁"
    assert len(sparkline([float(n) for n in range(100)])) == 24
    assert sparkline([0.0, 0.0, 1.0, 1.0, 2.0, 2.0], width=3) == "▁▅█"


def test_the_table_holds_what_was_measured(tmp_path: Path):
    result = Result(
        algorithm="ppo", flags=[], num_steps=24, before=0.4, after=0.9, shown="rollout/reward", curve=[0.5, 0.75],
        seconds=100.4,
    )  # fmt: skip
    (tmp_path / "ppo.json").write_text(json.dumps(asdict(result)))
    assert table(tmp_path)[2:] == ["| ppo | 24 | 0.400 -> 0.900 | `rollout/reward` 0.50 ▁█ 0.75 | 100 |"]
