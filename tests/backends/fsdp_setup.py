"""Tiny models, samples and configurations for the backend tests, all made in code."""

import json
import random
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from naive_objective import naive_loss, scores_of
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rlkit.algo.batching import build_updates
from rlkit.backends.fsdp.backend import BackendState, FsdpBackend
from rlkit.config.schema import ModelConfig, OptimizerConfig, RolloutConfig, RunConfig, TrainConfig
from rlkit.types.batches import Update
from rlkit.types.ranks import MetricSet, RankInfo
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


def spread_out(model: PreTrainedModel, seed: int = 7) -> PreTrainedModel:
    """Larger weights than a fresh model has, so that tokens and positions really differ in their log-probs."""
    generator = torch.Generator().manual_seed(seed)
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


def rank_info(
    rank: int = 0, world_size: int = 1, port: int = 0, device: str = "cpu", context_parallel_size: int = 1
) -> RankInfo:
    return RankInfo(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        master_addr="127.0.0.1",
        master_port=port,
        device=device,  # pyright: ignore[reportArgumentType]
        num_threads=1,
        context_parallel_size=context_parallel_size,
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


def make_uneven_samples(seed: int = 0) -> list[Sample]:
    """Eight samples in groups of 3, 1, 2 and 2: two of a single token, one of them alone in its group, and one that is
    masked as a whole.
    """
    samples = make_samples([(3, 5), (2, 1), (10, 20), (4, 1), (5, 9), (7, 30), (4, 4), (6, 2)], seed=seed)
    for sample, (group, index) in zip(
        samples, [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1), (3, 0), (3, 1)], strict=True
    ):
        sample.group_id, sample.index = group, index
    samples[6].loss_mask = [0] * 4
    return samples


MIXED_LENGTHS = [(3, 5), (1, 12), (10, 20), (2, 1), (5, 9), (7, 30), (4, 4), (6, 2)]
"""Eight samples, from 3 to 37 tokens."""


def make_updates(samples: Sequence[Sample], cfg: RunConfig, *, dp: int = 1) -> list[list[Update]]:
    """[rank][optimizer step], with the advantages that a rollout would get."""
    return build_updates(
        samples,
        scores_of(cfg, samples),
        dp=dp,
        batch_size=cfg.batch_size,
        max_tokens=cfg.train.max_tokens_per_gpu,
        cp=cfg.train.context_parallel_size,
        per_token_loss=cfg.algo.calculate_per_token_loss,
        constant_length=cfg.algo.loss_constant_length,
        with_rollout_logprobs=not cfg.is_supervised,
        require_reward=not cfg.is_supervised,
        keep_groups=cfg.is_dpo,
    )


def start_backend(cfg: RunConfig, *, resume_from: Path | None = None) -> FsdpBackend:
    """A backend that is alone in its process."""
    backend = FsdpBackend()
    backend.init(cfg, rank_info(), resume_from=resume_from)
    return backend


def parts_of(backend: FsdpBackend) -> Any:
    """What `init` built: model, optimizer, mesh, ..."""
    return backend._parts("be tested", BackendState.AWAKE, BackendState.ASLEEP)


def all_weights(backend: FsdpBackend, max_bytes: int = 1 << 20) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for bucket in backend.weights.buckets(max_bytes) for name, tensor in bucket.tensors()}


def train_step(backend: FsdpBackend, cfg: RunConfig, step: int = 0, samples: Sequence[Sample] = ()) -> MetricSet:
    """One `train` call on the mixed samples (or others), made from `step`."""
    chosen = samples or make_samples(MIXED_LENGTHS, seed=step)
    return backend.train(step, make_updates(chosen, cfg)[0])


@dataclass(frozen=True, kw_only=True)
class NaiveResult:
    """What an optimizer step comes to when written out: no packing, no sharding, no chunks."""

    loss: float
    grad_norm: float
    weights: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]


def naive_step(path: Path, cfg: RunConfig, samples: Sequence[Sample], *, padded: bool) -> NaiveResult:
    """The first optimizer step on all `samples`, by a plain transformers model: one sample after the other, or all
    padded.

    The reference model of the KL term is the model itself, so that term is zero at this step but its gradient is not
    always.
    """
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    logps, entropies = naive_log_probs(model, samples, cfg.rollout.rollout_temperature, padded=padded)
    refs = teachers = [logp.detach() for logp in logps]
    if cfg.model.ref_load is not None:
        refs = frozen_log_probs(cfg.model.ref_load, cfg, samples, padded=padded)
    if cfg.distill.opd_teacher_load is not None:
        teachers = frozen_log_probs(cfg.distill.opd_teacher_load, cfg, samples, padded=padded)
    total = naive_loss(cfg, samples, logps, entropies, refs, teachers)
    total.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.optimizer.clip_grad)
    settings = cfg.optimizer
    torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": settings.weight_decay},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=settings.lr,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_eps,
    ).step()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return NaiveResult(loss=total.item(), grad_norm=norm.item(), weights=weights, gradients=gradients)


def frozen_log_probs(path: str, cfg: RunConfig, samples: Sequence[Sample], *, padded: bool) -> list[torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        return naive_log_probs(model, samples, cfg.rollout.rollout_temperature, padded=padded)[0]


def naive_log_probs(
    model: PreTrainedModel, samples: Sequence[Sample], temperature: float, *, padded: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(log-probs, entropies) of the response tokens of each sample."""
    if padded:
        longest = max(sample.total_length for sample in samples)
        ids = torch.tensor([sample.tokens + [0] * (longest - sample.total_length) for sample in samples])
        mask = torch.tensor([[1] * s.total_length + [0] * (longest - s.total_length) for s in samples])
        all_logits = list(model(input_ids=ids, attention_mask=mask, use_cache=False).logits)
    else:
        all_logits = [model(input_ids=torch.tensor([s.tokens]), use_cache=False).logits[0] for s in samples]
    logps, entropies = [], []
    for sample, logits in zip(samples, all_logits, strict=True):
        rows = logits[sample.prompt_length - 1 : sample.total_length - 1] / temperature
        logp = rows.log_softmax(-1)
        targets = torch.tensor(sample.tokens[sample.prompt_length :])
        logps.append(logp.gather(1, targets[:, None]).squeeze(1))
        entropies.append(-(logp.exp() * logp).sum(-1))
    return logps, entropies
