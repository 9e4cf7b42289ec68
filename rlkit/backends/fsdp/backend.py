"""The FSDP2 backend: one training rank behind five functions (`backends/base.py`). Read `trainer.py` for what
happens in a step.
"""

import logging
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from rlkit.backends.fsdp.attention import choose_attention
from rlkit.backends.fsdp.checkpoint import load_checkpoint, save_checkpoint
from rlkit.backends.fsdp.export import export_hf
from rlkit.backends.fsdp.loading import CheckpointReader
from rlkit.backends.fsdp.model import (
    ScoringModel,
    build_model,
    fsdp,
    load_hf_weights,
    local_shard,
    max_positions,
    named_shards,
)
from rlkit.backends.fsdp.optimizer import ShardOptimizer, decay_steps
from rlkit.backends.fsdp.sleep import HostSwap
from rlkit.backends.fsdp.trainer import MicroBatch, Trainer, micro_batch
from rlkit.backends.fsdp.weights import FsdpWeights
from rlkit.config.schema import RunConfig
from rlkit.dist.collectives import max_over_data
from rlkit.dist.groups import RankMesh, init_process_group
from rlkit.observability.spans import SpanName, Spans
from rlkit.types.batches import Update
from rlkit.types.errors import ConfigError, TrainError
from rlkit.types.ranks import InitReport, MetricSet, RankInfo
from rlkit.types.weights import WeightSource

logger = logging.getLogger(__name__)

NUM_CHECKED_TOKENS = 8
MAX_SCORING_GAP = {torch.float32: 1e-3, torch.bfloat16: 0.3}
"""Largest log-prob difference between our scoring and the architecture's own logits that rounding explains."""


class BackendState(StrEnum):
    NEW = "new"
    AWAKE = "awake"
    ASLEEP = "asleep"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Parts:
    """What exists from `init` on."""

    cfg: RunConfig
    mesh: RankMesh
    policy: ScoringModel
    reference: ScoringModel | None
    optimizer: ShardOptimizer
    trainer: Trainer
    source: CheckpointReader
    weights: FsdpWeights
    swap: HostSwap
    reference_swap: HostSwap
    spans: Spans
    max_positions: int | None


class FsdpBackend:
    """See `backends.base.Backend`."""

    def __init__(self) -> None:
        self._state = BackendState.NEW
        self._built: _Parts | None = None

    @property
    def weights(self) -> WeightSource:
        return self._parts("read the weights", BackendState.AWAKE, BackendState.ASLEEP).weights

    def init(self, cfg: RunConfig, rank: RankInfo, *, resume_from: Path | None) -> InitReport:
        if self._state is not BackendState.NEW:
            raise TrainError(f"init called on a backend that is {self._state}; make a new one")
        start = time.perf_counter()
        if rank.device == "cpu":
            torch.set_num_threads(rank.num_threads)
        torch.manual_seed(cfg.train.seed + rank.rank)
        mesh = init_process_group(rank, timeout_s=60.0 * cfg.train.distributed_timeout_minutes)
        dtype = compute_dtype(cfg.model.dtype, rank.device)
        source = CheckpointReader(Path(cfg.model.hf_checkpoint))
        policy = _build(cfg, source, mesh, dtype, trainable=True, load_weights=resume_from is None)
        optimizer = ShardOptimizer(policy, cfg.optimizer)
        meta = None
        if resume_from is not None:
            meta = load_checkpoint(
                resume_from, policy, optimizer, mesh, with_optimizer=not cfg.checkpoint.no_load_optim
            )
        _check_scoring(policy, mesh, dtype)
        reference = None
        if cfg.needs_reference:
            path = Path(cfg.model.ref_load or cfg.model.hf_checkpoint)
            reference = _build(cfg, CheckpointReader(path), mesh, dtype, trainable=False, load_weights=True)
        spans, swap = Spans(), HostSwap()
        self._built = _Parts(
            cfg=cfg,
            mesh=mesh,
            policy=policy,
            reference=reference,
            optimizer=optimizer,
            trainer=Trainer(
                cfg,
                policy=policy,
                optimizer=optimizer,
                mesh=mesh,
                spans=spans,
                decay_steps=decay_steps(cfg),
                optimizer_steps=meta.optimizer_steps if meta and not cfg.checkpoint.no_load_optim else 0,
            ),
            source=source,
            weights=FsdpWeights(policy, mesh, dtype_of=dtype, read=swap.host_view),
            swap=swap,
            reference_swap=HostSwap(),
            spans=spans,
            max_positions=max_positions(policy.config),
        )
        self._state = BackendState.AWAKE
        self._rest_reference(self._built)
        return InitReport(
            num_params=sum(shard.numel() for _, shard in named_shards(policy)),
            resumed_step=meta.step if meta else None,
            seconds=time.perf_counter() - start,
        )

    def train(self, step: int, updates: list[Update]) -> MetricSet:
        parts = self._parts("train", BackendState.AWAKE)
        _check_lengths(updates, parts.max_positions)
        useful = [update for update in updates if update.num_loss_tokens > 0]
        if len(useful) < len(updates):
            logger.warning(
                f"step {step}: {len(updates) - len(useful)} of {len(updates)} optimizer steps have nothing to train on"
            )
        if parts.mesh.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        num_loss_tokens = [update.num_loss_tokens for update in useful]
        metrics: MetricSet = {
            "train/num_tokens": float(sum(num_loss_tokens)),
            "train/num_optimizer_steps": float(len(useful)),
        }
        if useful:
            with parts.spans(SpanName.TRAIN):
                prepared = [[micro_batch(batch) for batch in update.micro_batches] for update in useful]
                prepared = self._with_reference(parts, prepared)
                prepared = self._with_old(parts, prepared)
                metrics |= parts.trainer.train(step, prepared, num_loss_tokens=num_loss_tokens)
        return metrics | parts.spans.drain() | _peak_memory(parts.mesh)

    def save(self, step: int, directory: Path, *, hf_directory: Path | None) -> None:
        parts = self._parts("save", BackendState.AWAKE)
        save_checkpoint(
            directory,
            parts.policy,
            parts.optimizer,
            parts.mesh,
            step=step,
            optimizer_steps=parts.trainer.optimizer_steps,
        )
        if hf_directory is not None:
            export_hf(parts.policy, parts.mesh, parts.source, hf_directory)

    def sleep(self) -> None:
        parts = self._parts("sleep", BackendState.AWAKE)
        parts.optimizer.zero_grad()
        if parts.mesh.device.type == "cuda":
            parts.swap.offload([*_local_shards(parts.policy), *parts.optimizer.state_tensors()])
            torch.cuda.empty_cache()
        self._state = BackendState.ASLEEP

    def wake_up(self) -> None:
        parts = self._parts("wake up", BackendState.ASLEEP)
        parts.swap.restore()
        self._state = BackendState.AWAKE

    def _parts(self, action: str, *states: BackendState) -> _Parts:
        if self._built is None or self._state not in states:
            raise TrainError(f"cannot {action}: the backend is {self._state}, it must be {' or '.join(states)}")
        return self._built

    def _with_reference(self, parts: _Parts, updates: list[list[MicroBatch]]) -> list[list[MicroBatch]]:
        if parts.reference is None:
            return updates
        parts.reference_swap.restore()
        scored = [
            _with(updates_of, "ref_logp_T", parts.trainer.score(parts.reference, updates_of)) for updates_of in updates
        ]
        self._rest_reference(parts)
        return scored

    def _rest_reference(self, parts: _Parts) -> None:
        """The reference is on the GPU only while it scores."""
        if parts.reference is not None and parts.mesh.device.type == "cuda":
            parts.reference_swap.offload(_local_shards(parts.reference))
            torch.cuda.empty_cache()

    def _with_old(self, parts: _Parts, updates: list[list[MicroBatch]]) -> list[list[MicroBatch]]:
        """Score the updates whose policy will have moved: all but the first, whose old log-probs equal the current
        ones by construction.
        """
        if parts.cfg.is_sft or parts.cfg.algo.use_rollout_logprobs:
            return updates
        scored = [_with(update, "old_logp_T", parts.trainer.score(parts.policy, update)) for update in updates[1:]]
        return [updates[0], *scored]


def compute_dtype(dtype: Literal["auto", "float32", "bfloat16"], device: Literal["cpu", "cuda"]) -> torch.dtype:
    """What forward and backward compute in."""
    if dtype == "auto":
        return torch.bfloat16 if device == "cuda" else torch.float32
    return torch.float32 if dtype == "float32" else torch.bfloat16


def _build(
    cfg: RunConfig,
    source: CheckpointReader,
    mesh: RankMesh,
    dtype: torch.dtype,
    *,
    trainable: bool,
    load_weights: bool,
) -> ScoringModel:
    attention = choose_attention(cfg.model.attn_implementation, device=mesh.device, dtype=dtype)
    model = build_model(
        source.path,
        cfg.model,
        mesh,
        attention=attention,
        compute_dtype=dtype,
        trainable=trainable,
        gradient_checkpointing=trainable and cfg.train.gradient_checkpointing,
    )
    if load_weights:
        load_hf_weights(model, source, mesh)
    return model


def _check_scoring(policy: ScoringModel, mesh: RankMesh, dtype: torch.dtype) -> None:
    """Some architectures scale or cap their logits after the head. Scoring without that would train on wrong
    log-probs in silence.
    """
    count = min(NUM_CHECKED_TOKENS, policy.config.get_text_config().vocab_size)
    with torch.no_grad():
        gap = policy.check_scoring(torch.arange(count, device=mesh.device))
    fsdp(policy).reshard()
    if not gap <= MAX_SCORING_GAP[dtype]:
        raise ConfigError(
            f"{type(policy.hf_model).__name__} changes its logits after the head: log-probs differ by {gap:.3g}; "
            "the FSDP backend does not support this architecture"
        )


def _check_lengths(updates: list[Update], limit: int | None) -> None:
    longest = max((batch.max_seqlen for update in updates for batch in update.micro_batches), default=0)
    if limit is not None and longest > limit:
        raise TrainError(
            f"a sample of {longest} tokens exceeds the model's max_position_embeddings = {limit}; "
            "lower --rollout-max-context-len (or prompt and response lengths)"
        )


def _with(micro_batches: list[MicroBatch], name: str, values: list[Tensor]) -> list[MicroBatch]:
    return [
        replace(micro, batch=replace(micro.batch, **{name: value}))
        for micro, value in zip(micro_batches, values, strict=True)
    ]


def _local_shards(model: ScoringModel) -> Iterator[Tensor]:
    for _, shard in named_shards(model):
        yield local_shard(shard)


def _peak_memory(mesh: RankMesh) -> MetricSet:
    """Largest memory of any rank in GiB: of the GPU during this call, or of the process since it started.
    Collective.
    """
    if mesh.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated() / 1024**3
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
    return {"memory/train_peak_gib": max_over_data(torch.tensor([peak]), mesh).item()}
