"""The recorded cases of config validation, as a person would meet them: on the command line."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlkit.config.errors import ConfigError
from rlkit.config.load import load_config
from rlkit.config.schema import RunConfig

CASES = {
    case["id"]: case
    for case in map(json.loads, (Path(__file__).parents[1] / "data" / "cases.jsonl").read_text().splitlines())
}


def rows(case_id: str) -> list[tuple[dict[str, Any], str]]:
    case = CASES[case_id]
    return list(zip(case["input"]["rows"], case["expected"]["result"], strict=True))


def accepted(argv: list[str]) -> RunConfig:
    return load_config(argv).config


def refused(argv: list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(argv)
    return str(caught.value)


@pytest.mark.parametrize("number", range(3))
def test_cv_01_group_size(valid_argv: list[str], number: int):
    case = CASES["cv-01"]
    argv = [*valid_argv, "--n-samples-per-prompt", str(case["input"]["n_samples_per_prompt"][number])]
    if case["expected"]["result"][number] == "accepted":
        accepted(argv)
    else:
        message = refused(argv)
        assert all(mention in message for mention in case["expected"]["message_mentions"])


@pytest.mark.parametrize(("row", "result"), rows("cv-02"), ids=str)
def test_cv_02_batch_arithmetic(valid_argv: list[str], row: dict[str, int], result: str):
    argv = [*valid_argv, "--num-rollout", str(row["num_rollout"]), "--n-samples-per-prompt", str(row["n"])]
    argv += ["--rollout-batch-size", str(row["rollout_batch_size"])]
    argv += ["--global-batch-size", str(row["global_batch_size"]), "--actor-num-gpus-per-node", str(row["dp"])]
    if result == "accepted":
        config, expected = accepted(argv), CASES["cv-02"]["expected"]
        assert config.steps_per_rollout == expected["steps_per_rollout_row3"]
        assert config.steps_per_rollout * row["num_rollout"] == expected["train_iters_row3"]
    else:
        message = refused(argv)
        assert "global_batch_size" in message and "--global-batch-size" in message
        assert "rollout_batch_size * n_samples_per_prompt" in message or "training ranks" in message


def test_cv_03_temperature(valid_argv: list[str]):
    case = CASES["cv-03"]
    for temperature, result in zip(case["input"]["rollout_temperature"], case["expected"]["rollout"], strict=True):
        argv = [*valid_argv, "--rollout-temperature", str(temperature)]
        if result == "accepted":
            accepted(argv)
        else:
            assert "rollout_temperature" in refused(argv)
    assert case["expected"]["eval_0.0"].startswith("accepted")
    for temperature in case["input"]["eval_temperature"]:
        accepted([*valid_argv, "--eval-temperature", str(temperature)])


@pytest.mark.parametrize(
    ("row", "result"),
    rows("cv-05"),
    ids=str,
)
def test_cv_05_attention_with_context_parallelism(valid_argv: list[str], row: dict[str, Any], result: str):
    """SDPA is accepted: tests/backends/test_context_parallel.py shows that it gives the same step."""
    argv = [*valid_argv, "--attn-implementation", row["attn_implementation"], "--actor-num-gpus-per-node", "2"]
    argv += ["--rollout-num-gpus", "2", "--context-parallel-size", str(row["context_parallel_size"])]
    if result == "rejected":
        message = refused(argv)
        assert "context_parallel_size" in message and "flash_attention_2" in message
    else:
        accepted(argv)


def test_ls_09_dual_clip_constant(valid_argv: list[str]):
    case = CASES["ls-09"]
    accepted([*valid_argv, "--eps-clip-c", str(case["input"]["clip_c"])])
    assert case["expected"]["bad_clip_c"] == "rejected"
    for constant in case["input"]["bad_clip_c"]:
        assert "eps_clip_c" in refused([*valid_argv, "--eps-clip-c", str(constant)])
