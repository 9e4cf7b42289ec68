"""Tiny models, samples and configurations for the backend tests, all made in code."""

import json
import random
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from rlkit.config.schema import ModelConfig, OptimizerConfig, RolloutConfig, RunConfig, TrainConfig
from rlkit.types.ranks import RankInfo
from rlkit.types.samples import Sample, SampleStatus

VOCAB = 37


def tiny_qwen3(*, tied: bool = True) -> Qwen3ForCausalLM:
    """Grouped heads, head size unlike hidden / heads, query and key norms."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=128,
            tie_word_embeddings=tied,
            pad_token_id=0,
        )
    )


def tiny_llama() -> LlamaForCausalLM:
    """Untied head, biases in attention and MLP, an odd number of rows to shard."""
    torch.manual_seed(1)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=24,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=3,
            num_key_value_heads=1,
            attention_bias=True,
            mlp_bias=True,
            max_position_embeddings=128,
            tie_word_embeddings=False,
        )
    )


def spread_out(model: PreTrainedModel) -> PreTrainedModel:
    """Larger weights than a fresh model has, so that tokens and positions really differ in their log-probs."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * (0.3 if "norm" not in name else 0.1))
    return model


def save_checkpoint_dir(model: PreTrainedModel, path: Path) -> Path:
    model.save_pretrained(path)
    (path / "tokenizer_config.json").write_text(json.dumps({"made_for": "tests"}))
    return path


def make_config(path: Path, **changes: object) -> RunConfig:
    """A run of 3 steps of 8 samples; `changes` replace fields of any section by their names."""
    cfg = RunConfig(
        model=ModelConfig(hf_checkpoint=str(path), dtype="float32"),
        rollout=RolloutConfig(num_rollout=3, rollout_batch_size=4, n_samples_per_prompt=2),
        optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.1),
        train=TrainConfig(max_tokens_per_gpu=64, log_probs_chunk_size=16),
    )
    for name, value in changes.items():
        sections = [s for s in RunConfig.__dataclass_fields__ if name in type(getattr(cfg, s)).__dataclass_fields__]
        assert len(sections) == 1, f"{name} is in {sections}"
        cfg = replace(cfg, **{sections[0]: replace(getattr(cfg, sections[0]), **{name: value})})
    return cfg


def rank_info(rank: int = 0, world_size: int = 1, port: int = 0, device: str = "cpu") -> RankInfo:
    return RankInfo(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        master_addr="127.0.0.1",
        master_port=port,
        device=device,  # pyright: ignore[reportArgumentType]
        num_threads=1,
    )


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def make_samples(lengths: Sequence[tuple[int, int]], *, seed: int = 0, group_size: int = 2) -> list[Sample]:
    """One sample per (prompt length, response length), with gaps in the loss mask, engine log-probs and a reward."""
    rng = random.Random(seed)
    samples = []
    for number, (prompt, response) in enumerate(lengths):
        mask = [int(rng.random() < 0.8) for _ in range(response)]
        mask[-1] = 1
        samples.append(
            Sample(
                group_id=number // group_size,
                index=number % group_size,
                seed=number,
                tokens=[rng.randrange(1, VOCAB) for _ in range(prompt + response)],
                prompt_length=prompt,
                loss_mask=mask,
                rollout_logprobs=[-3.0 * rng.random() for _ in range(response)],
                status=SampleStatus.COMPLETED,
                reward=rng.random(),
            )
        )
    return samples


MIXED_LENGTHS = [(3, 5), (1, 12), (10, 20), (2, 1), (5, 9), (7, 30), (4, 4), (6, 2)]
"""Eight samples, from 3 to 37 tokens."""
