"""A checkpoint folder without weights, a prompt file, and configs over them."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_engine_server import EOS
from managed_rollouts import ALPHABET

from rlkit.config.schema import (
    AlgoConfig,
    DataConfig,
    DebugConfig,
    EngineConfig,
    EvalConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
)


@pytest.fixture(scope="session")
def checkpoint_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Character tokenizer (`<pad>` 0, `<eos>` 1, then ALPHABET from 2 on), `config.json` with 64 positions."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("checkpoint")
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *ALPHABET])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>").save_pretrained(path)
    (path / "config.json").write_text(
        json.dumps({"model_type": "x", "max_position_embeddings": 64, "eos_token_id": EOS})
    )
    return path


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    """Ten sums."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"input": f"{a}+{a}=", "label": str(2 * a)}) + "\n" for a in range(10)))
    return path


@pytest.fixture
def make_run(checkpoint_dir: Path, prompt_file: Path) -> Callable[..., RunConfig]:
    """`make_run(rollout={"rollout_batch_size": 4}, ...)`: a config of 4 prompts x 3 samples, changed section by
    section.
    """

    def make(**sections: dict[str, Any]) -> RunConfig:
        cfg = RunConfig(
            model=ModelConfig(hf_checkpoint=str(checkpoint_dir)),
            data=DataConfig(prompt_data=str(prompt_file), label_key="label"),
            rollout=RolloutConfig(rollout_batch_size=4, n_samples_per_prompt=3, rollout_max_response_len=16),
            reward=RewardConfig(rm_type="exact"),
            evaluation=EvalConfig(),
            engine=EngineConfig(engine_timeout_s=20.0),
            algo=AlgoConfig(),
            train=TrainConfig(max_tokens_per_gpu=64),
            debug=DebugConfig(),
        )
        return replace(cfg, **{name: replace(getattr(cfg, name), **changes) for name, changes in sections.items()})

    return make
