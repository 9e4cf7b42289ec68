"""Evaluation sets of a file: own keys, sampling and graders; categories; what a run leaves behind."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from fake_engine_server import FakeEngine
from managed_rollouts import calculator, managed

from rlkit.config.eval_sets import eval_sets
from rlkit.config.rules import check_paths
from rlkit.config.schema import RunConfig
from rlkit.rollout.metrics import eval_table, pass_rates, rollout_metrics
from rlkit.types.errors import ConfigError
from rlkit.types.samples import Prompt, Sample, SampleGroup, SampleStatus

MakeRun = Callable[..., RunConfig]

YAML = """
eval:
  defaults:
    n_samples_per_eval_prompt: 2
    temperature: 0.5
  datasets:
    - name: small
      path: {folder}/small.jsonl
      category_key: kind
    - name: other
      path: {folder}/other.jsonl@[:3]
      input_key: question
      label_key: answer
      temperature: 0
      n_samples_per_eval_prompt: 1
      max_response_len: 3
      custom_rm_path: {folder}/grader.py:length
      reward_key: chars
      metadata_overrides: {{level: 9}}
"""
TOML = """
[eval.defaults]
n_samples_per_eval_prompt = 2
temperature = 0.5
[[eval.datasets]]
name = "small"
path = "{folder}/small.jsonl"
category_key = "kind"
[[eval.datasets]]
name = "other"
path = "{folder}/other.jsonl@[:3]"
input_key = "question"
label_key = "answer"
temperature = 0
n_samples_per_eval_prompt = 1
max_response_len = 3
custom_rm_path = "{folder}/grader.py:length"
reward_key = "chars"
metadata_overrides = {{level = 9}}
"""


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, timeout=60))


def write(folder: Path, text: str, suffix: str) -> str:
    small = [
        {"input": f"{a}+{a}=", "label": str(2 * a), "metadata": {"kind": "odd/one" if a % 2 else "even"}}
        for a in range(5)
    ]
    other = [{"question": f"{a}+1=", "answer": str(a + 1)} for a in range(9)]
    for name, rows in (("small", small), ("other", other)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "grader.py").write_text(
        "def length(response, label, metadata):\n    return {'chars': len(response) + metadata['level'], 'score': 0}\n"
    )
    path = folder / f"sets{suffix}"
    path.write_text(text.format(folder=folder))
    return str(path)


@pytest.mark.parametrize(("text", "suffix"), [(YAML, ".yaml"), (TOML, ".toml")], ids=["yaml", "toml"])
def test_sets_of_a_file_have_their_own_sampling_graders_and_keys(
    make_run: MakeRun, tmp_path: Path, text: str, suffix: str
):
    file = write(tmp_path, text, suffix)
    cfg = make_run(evaluation={"eval_interval": 1, "eval_config": file})
    assert check_paths(cfg) == []
    odd = lambda seed: True  # noqa: E731
    engine = FakeEngine(
        speech=lambda body: calculator(right=odd if body["input_ids"][0] % 2 else lambda seed: False)(body)
    )

    async def main() -> dict[str, float]:
        async with managed(cfg, tmp_path, engine) as manager:
            return await manager.evaluate(7)

    metrics = run(main())
    # token 2 + a: prompts with an odd first token (odd a) are answered right
    assert metrics["eval/small"] == pytest.approx(2 / 5) and metrics["eval/small/num_samples"] == 10
    assert metrics["eval/small/by/odd_one"] == 1.0 and metrics["eval/small/by/even"] == 0.0
    assert metrics["eval/small/pass@2"] == pytest.approx(2 / 5)
    assert metrics["eval/other"] == 10.0 and metrics["eval/other/num_samples"] == 3
    assert not any("other/by" in name or "other/pass" in name for name in metrics)
    temperatures = [body["sampling_params"]["temperature"] for body in engine.requests]
    assert sorted(temperatures) == [0.0] * 3 + [0.5] * 10
    assert {b["sampling_params"]["max_new_tokens"] for b in engine.requests} == {3, 16}
    lines = [json.loads(line) for line in (tmp_path / "eval.jsonl").read_text().splitlines()]
    assert [(line["step"], line["name"], line["score"]) for line in lines] == [
        (7, "small", metrics["eval/small"]),
        (7, "other", 10.0),
    ]
    assert lines[0]["by/odd_one"] == 1.0 and lines[0]["pass@2"] == metrics["eval/small/pass@2"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ("temperature: 0\n", "temprature: 0\n"),
            r"datasets\[1\]: unknown key 'temprature'; did you mean 'temperature'",
        ),
        (("temperature: 0\n", "temperature: hot\n"), r"temperature = 'hot' must be float"),
        (("temperature: 0\n", "temperature: true\n"), "must not be a truth value"),
        (("name: other", "name: small"), "given twice: small"),
        (("name: other", "name: a b"), "no name for metrics"),
        (("      path: {folder}/small.jsonl\n", ""), r"datasets\[0\] needs `name` and `path`"),
        (("datasets:", "data:"), "list `datasets`"),
        (("defaults:", "default:"), "unknown key 'default'"),
        (("eval:", "eval: ["), "is not YAML"),
    ],
)
def test_mistakes_in_a_file_are_named(make_run: MakeRun, tmp_path: Path, change: tuple[str, str], message: str):
    file = write(tmp_path, YAML.replace(*change), ".yaml")
    cfg = make_run(evaluation={"eval_interval": 1, "eval_config": file})
    with pytest.raises(ConfigError, match=message):
        eval_sets(cfg)
    assert len(check_paths(cfg)) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("other.jsonl", "no.jsonl"), "other: there is no file .*no.jsonl"),
        (("grader.py:length", "grader.py:size"), "has no 'size', it has length"),
        (("      category_key: kind", "      rm_type: maths"), "rm_type = maths is not a built-in grader"),
    ],
)
def test_files_and_graders_of_sets_are_checked_before_a_launch(
    make_run: MakeRun, tmp_path: Path, change: tuple[str, str], message: str
):
    file = write(tmp_path, YAML.replace(*change), ".yaml")
    (problem,) = check_paths(make_run(evaluation={"eval_interval": 1, "eval_config": file}))
    import re

    assert re.search(message, problem), problem


def test_the_table_has_a_line_for_each_set_and_category():
    table = eval_table(
        {
            "eval/a": 0.5,
            "eval/a/num_samples": 8,
            "eval/a/unscored": 0,
            "eval/a/pass@1": 0.5,
            "eval/a/pass@2": 0.75,
            "eval/a/response_length": 12.0,
            "eval/a/truncated_ratio": 0.25,
            "eval/a/by/algebra": 0.25,
            "time/evaluate_s": 1.0,
        }
    )
    assert table.splitlines() == [
        "evaluation  score      pass  samples  unscored  length    cut",
        "a           0.500  0.750 @2        8         0    12.0  25.0%",
        "  algebra   0.250",
    ]
    assert eval_table({"time/evaluate_s": 1.0}) == ""


def test_pass_rates_of_training_rollouts_on_demand():
    rewards = [[1.0, 0.0, 0.0, 0.0], [0.0] * 4]
    assert pass_rates("x", rewards) == pytest.approx({"x/pass@1": 0.125, "x/pass@2": 0.25, "x/pass@4": 0.5})
    assert pass_rates("x", [[1.0]]) == {}
    groups = [
        SampleGroup(
            group_id=0,
            prompt=Prompt(position=0, epoch=0, token_ids=[1], text=""),
            samples=[
                Sample(
                    group_id=0, index=i, seed=0, tokens=[1, 2], prompt_length=1, reward=r, status=SampleStatus.COMPLETED
                )
                for i, r in enumerate([1.0, 0.0])
            ],
        )
    ]
    assert "rollout/pass@2" not in rollout_metrics(groups, seconds=1.0)
    assert rollout_metrics(groups, seconds=1.0, log_passrate=True)["rollout/pass@2"] == 1.0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("n_samples_per_eval_prompt: 0", "n_samples_per_eval_prompt = 0 must be at least 1"),
        ("temperature: .nan", "temperature = nan must be finite, and at least 0"),
        ("temperature: -1.0", "temperature = -1.0"),
        ("top_p: 2.0", "top_p = 2.0 must be above 0 and at most 1"),
        ("top_k: 0", "top_k = 0"),
        ("max_response_len: 0", "max_response_len = 0 must be at least 1"),
        ("max_prompt_len: 0", "max_prompt_len = 0 must be at least 1"),
        ("repetition_penalty: -1.0", "repetition_penalty = -1.0"),
        ("min_new_tokens: 500", "min_new_tokens = 500 must be at least 0 and at most max_response_len = 16"),
    ],
    ids=lambda text: text.split(" ")[0],
)
def test_numbers_of_a_set_are_checked(make_run: MakeRun, tmp_path: Path, given: str, said: str):
    file = write(
        tmp_path, "datasets: [{{name: a, path: {folder}/small.jsonl, max_response_len: 16, " + given + "}}]", ".yaml"
    )
    cfg = make_run(evaluation={"eval_interval": 1, "eval_config": file})
    assert any(said in problem and "'a'" in problem for problem in check_paths(cfg)), check_paths(cfg)
