"""`train.py` takes turns, `train_async.py` does not: each refuses the other's loop, before anything starts."""

import pytest

from rlkit.cli.entry import prepare_run
from rlkit.config.errors import ConfigError
from rlkit.config.load import load_config

ARGV = [
    "--hf-checkpoint", "m", "--prompt-data", "p.jsonl", "--label-key", "l", "--rm-type", "math", "--num-rollout", "3",
    "--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--actor-num-gpus-per-node", "1",
]  # fmt: skip
SPLIT = [*ARGV, "--rollout-num-gpus", "1"]


def test_one_step_ahead_is_what_train_async_does_unless_told_otherwise(tmp_path):
    resolved = load_config(SPLIT, program="train_async.py")
    assert resolved.config.async_training.async_mode == "one-step"
    assert resolved.provenance["async_mode"] == "train_async.py"
    assert load_config(SPLIT).config.async_training.async_mode is None
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('async_mode = "full"\n')
    assert load_config(["--config", str(recipe), *SPLIT], program="train_async.py").config.async_training.is_full


@pytest.mark.parametrize(
    ("program", "flags", "told"),
    [
        ("train.py", [*SPLIT, "--async-mode", "full"], "async_mode = full, but train.py takes turns.*train_async.py"),
        ("train_async.py", [*SPLIT, "--async-mode", "None"], "is what train.py does"),
        (
            "train_async.py",
            [*ARGV, "--colocate"],
            "colocate = True makes engines and trainer take turns.*drop --colocate",
        ),
        ("train_async.py", [*SPLIT, "--max-staleness", "1"], "max_staleness = 1 has no effect.*--async-mode full"),
        ("train_async.py", [*SPLIT, "--debug-rollout-only"], "debug_rollout_only = True trains nothing"),
    ],
)
def test_what_cannot_work_is_said_at_once(program, flags, told):
    with pytest.raises(ConfigError, match=told):
        prepare_run(flags, program=program)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ([], "one rollout is generated while the one before it trains; weights change when the last response is there"),
        (["--pause-generation-mode", "retract"], "before it trains; weights change under running requests"),
        (["--async-mode", "full", "--max-staleness", "3"], "at most 16 prompts in flight, 3 weight versions behind"),
    ],
)
def test_a_dry_run_says_what_happens_meanwhile(flags, told, capsys):
    with pytest.raises(SystemExit):
        prepare_run([*SPLIT, *flags, "--dry-run"], program="train_async.py")
    assert told in " ".join(capsys.readouterr().out.split())
