import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlkit.config.eval_sets import eval_sets
from rlkit.config.schema import EngineConfig, EvalConfig, ModelConfig, RolloutConfig, RunConfig
from rlkit.rollout.sampling import context_limit, eval_sampling, rollout_sampling
from rlkit.types.errors import ConfigError

ROLLOUT = RolloutConfig(
    rollout_temperature=0.8,
    rollout_top_p=0.95,
    rollout_top_k=40,
    rollout_max_response_len=77,
    rollout_stop=("###",),
    rollout_stop_token_ids=(9, 3),
    rollout_skip_special_tokens=True,
)


def test_rollout_sampling_takes_every_flag_and_the_models_end_ids():
    sampling = rollout_sampling(RunConfig(rollout=ROLLOUT), {2, 3})
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_new_tokens) == (0.8, 0.95, 40, 77)
    assert (sampling.stop, sampling.stop_token_ids, sampling.skip_special_tokens) == (("###",), (2, 3, 9), True)


def test_eval_sampling_falls_back_to_the_rollouts():
    cfg = RunConfig(rollout=ROLLOUT, evaluation=EvalConfig(eval_prompt_data=("a", "a.jsonl")))
    assert eval_sampling(cfg, {2}, eval_sets(cfg)[0]) == rollout_sampling(cfg, {2})


def test_eval_overrides_win_also_where_they_are_zero():
    pair = ("a", "a.jsonl")
    overrides = EvalConfig(
        eval_prompt_data=pair, eval_temperature=0.0, eval_top_p=1.0, eval_top_k=-1, eval_max_response_len=5
    )
    cfg = RunConfig(rollout=ROLLOUT, evaluation=overrides)
    sampling = eval_sampling(cfg, {2}, eval_sets(cfg)[0])
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_new_tokens) == (0.0, 1.0, -1, 5)
    assert sampling.stop_token_ids == (2, 3, 9)


@pytest.mark.parametrize(
    ("model", "user", "engine", "expected"),
    [
        ({"max_position_embeddings": 512}, None, None, 506),
        ({"max_position_embeddings": 512}, 100, None, 100),
        ({"max_position_embeddings": 512}, 1000, None, 506),
        ({"max_position_embeddings": 512}, 1000, 2000, 1000),
        ({"max_position_embeddings": 512}, None, 200, 194),
        ({"text_config": {"max_position_embeddings": 64}}, None, None, 58),
        ({"max_position_embeddings": 512, "rope_scaling": {"type": "yarn", "factor": 4.0}}, None, None, 2042),
        (
            {
                "max_position_embeddings": 2048,
                "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
            },
            None,
            None,
            2042,
        ),
        ({"max_position_embeddings": 512, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, None, None, 506),
        ({}, None, None, None),
    ],
    ids=[
        "model",
        "user",
        "user-beyond-model",
        "engine-flag-wins",
        "engine-flag",
        "nested",
        "yarn",
        "yarn-done",
        "llama3",
        "unstated",
    ],
)
def test_context_limit(
    tmp_path: Path, model: dict[str, Any], user: int | None, engine: int | None, expected: int | None
):
    (tmp_path / "config.json").write_text(json.dumps(model))
    cfg = RunConfig(
        model=ModelConfig(hf_checkpoint=str(tmp_path)),
        rollout=RolloutConfig(rollout_max_context_len=user),
        engine=EngineConfig(sglang={} if engine is None else {"context_length": engine}),
    )
    assert context_limit(cfg) == expected


def test_a_checkpoint_without_config_is_a_config_error(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"--hf-checkpoint: .*config\.json"):
        context_limit(RunConfig(model=ModelConfig(hf_checkpoint=str(tmp_path))))


def test_only_training_rollouts_run_past_the_end_of_sequence():
    evaluation = EvalConfig(eval_prompt_data=("a", "a.jsonl"))
    cfg = RunConfig(rollout=replace(ROLLOUT, rollout_ignore_eos=True), evaluation=evaluation)
    assert rollout_sampling(cfg, {2}).ignore_eos
    assert not eval_sampling(cfg, {2}, eval_sets(cfg)[0]).ignore_eos
