"""One Ray for all whole-loop tests, a tiny random model, and a toy task that it can learn: answer with digits."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest

ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz +-*=?"
REWARD = '''
def share_of_digits(response, label, metadata):
    """1 for a response of digits only, 0 for none."""
    return sum(character.isdigit() for character in response) / max(1, len(response))
'''


@pytest.fixture(scope="session")
def shared_ray() -> Iterator[None]:
    """Ray with four rank slots; a Session joins it instead of starting its own, which saves several seconds a test."""
    import logging

    import ray

    ray.init(
        num_cpus=4,
        resources={"rank_slot": 4.0},
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=256 * 1024**2,
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A random Qwen3 of about 60 thousand parameters with a character tokenizer, saved as a Hugging Face checkpoint."""
    import torch
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    path = tmp_path_factory.mktemp("tiny_model")
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *ALPHABET])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def task(tmp_path_factory) -> Path:
    """A folder with `train.jsonl` (64 prompts), `test.jsonl` (16) and the reward function."""
    path = tmp_path_factory.mktemp("task")
    rng = random.Random(0)
    rows = [{"input": f"{rng.randint(0, 99)} + {rng.randint(0, 99)} =", "label": "1"} for _ in range(80)]
    (path / "train.jsonl").write_bytes(b"\n".join(map(orjson.dumps, rows[:64])))
    (path / "test.jsonl").write_bytes(b"\n".join(map(orjson.dumps, rows[64:])))
    (path / "reward.py").write_text(REWARD)
    return path


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a finished run left behind."""

    directory: Path
    rows: list[dict[str, Any]]

    def series(self, name: str) -> list[float]:
        return [row[name] for row in self.rows if name in row]


@pytest.fixture
def run_training(shared_ray, tiny_model, task, tmp_path) -> Callable[..., Run]:
    """`run_training("--flag", value, ..., name="first")` runs `train.py`'s main, or another one, in this process."""
    import train

    def run(
        *flags: object, name: str = "run", main: Callable[[list[str]], None] = train.main, without: tuple[str, ...] = ()
    ) -> Run:
        directory = tmp_path / name
        basics = {
            "--hf-checkpoint": tiny_model,
            "--prompt-data": task / "train.jsonl",
            "--label-key": "label",
            "--custom-rm-path": f"{task / 'reward.py'}:share_of_digits",
            "--rollout-batch-size": 8,
            "--n-samples-per-prompt": 4,
            "--rollout-max-response-len": 12,
            "--num-gpus-per-node": 4,
            "--device": "cpu",
            "--lr": 3e-3,
            "--output-dir": directory,
        }
        given = {str(flag) for flag in flags} | {*without}
        argv = [str(part) for flag, value in basics.items() if flag not in given for part in (flag, value)]
        main([*argv, *map(str, flags)])
        metrics = directory / "metrics.jsonl"
        return Run(directory=directory, rows=[orjson.loads(line) for line in metrics.read_bytes().splitlines()])

    return run
