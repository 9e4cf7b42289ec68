"""The FSDP2 backend: one training rank behind five functions (`backends/base.py`). Read `trainer.py` for what
happens in a step.
"""

import logging
import os
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from rlkit.backends.fsdp.attention import choose_attention
from rlkit.backends.fsdp.checkpoint import BackgroundWrite, copy_state, load_checkpoint, tensors_to_save, write
from rlkit.backends.fsdp.compilation import is_compiled, keep_compiled_code
from rlkit.backends.fsdp.export import export_hf
from rlkit.backends.fsdp.fingerprint import live_sums
from rlkit.backends.fsdp.loading import CheckpointReader
from rlkit.backends.fsdp.memory import choose_blocks
from rlkit.backends.fsdp.model import (
    BlockPlan,
    ScoringModel,
    build_model,
    load_hf_weights,
    local_shard,
    max_positions,
    named_shards,
    reshard,
)
from rlkit.backends.fsdp.optimizer import ShardOptimizer, decay_steps
from rlkit.backends.fsdp.sleep import ALIGNMENT, Copied, HostSwap
from rlkit.backends.fsdp.trainer import MicroBatch, Trainer, micro_batch
from rlkit.backends.fsdp.weights import FsdpWeights
from rlkit.config.schema import RunConfig
from rlkit.dist.collectives import max_over_shards
from rlkit.dist.groups import RankMesh, cpu_mesh, init_process_group, new_cpu_group
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
class FrozenModel:
    """A model that scores and is never trained: reference or teacher. On the GPU only while it scores."""

    column: Literal["ref_logp_T", "teacher_logp_T"]
    """Field of `PackedBatch` that it fills."""
    model: ScoringModel
    swap: HostSwap

    def rest(self, device: torch.device) -> None:
        if device.type == "cuda":
            self.swap.offload(_local_shards(self.model))
            torch.cuda.empty_cache()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Parts:
    """What exists from `init` on."""

    cfg: RunConfig
    mesh: RankMesh
    policy: ScoringModel
    frozen: list[FrozenModel]
    optimizer: ShardOptimizer
    trainer: Trainer
    source: CheckpointReader
    weights: FsdpWeights
    swap: HostSwap
    stage: HostSwap
    """Where `--async-save` keeps its copy. A save that is waited for borrows the buffer of `swap`."""
    host_mesh: DeviceMesh
    """The ranks, for copies of shards in host memory."""
    save_group: ProcessGroup | None
    """Of the thread that writes with `--async-save`."""
    spans: Spans
    max_positions: int | None


class FsdpBackend:
    """See `backends.base.Backend`."""

    def __init__(self) -> None:
        self._state = BackendState.NEW
        self._built: _Parts | None = None
        self._write: BackgroundWrite | None = None
        self._moved: MetricSet = {}

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
        timeout_s = 60.0 * cfg.train.distributed_timeout_minutes
        mesh = init_process_group(rank, timeout_s=timeout_s)
        if is_compiled(cfg.train.torch_compile, mesh.device):
            keep_compiled_code(os.environ)
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
        frozen = list(_frozen_models(cfg, mesh, dtype))
        spans, swap, stage = Spans(), HostSwap(mesh.device), HostSwap(mesh.device)
        if mesh.device.type == "cuda":
            _reserve_host_memory(cfg, policy, swap, stage)
        self._built = _Parts(
            cfg=cfg,
            mesh=mesh,
            policy=policy,
            frozen=frozen,
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
            stage=stage,
            host_mesh=cpu_mesh(mesh),
            save_group=new_cpu_group(timeout_s=timeout_s) if cfg.checkpoint.async_save else None,
            spans=spans,
            max_positions=max_positions(policy.config),
        )
        self._state = BackendState.AWAKE
        return InitReport(
            num_params=sum(shard.numel() for _, shard in named_shards(policy)),
            resumed_step=meta.step if meta else None,
            memory_plan=policy.plan.sentence,
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
                prepared = [
                    # uploaded at once: a few megabytes, and nothing has to be copied inside the loops
                    [micro_batch(batch, parts.mesh).to(parts.mesh.device) for batch in update.micro_batches]
                    for update in useful
                ]
                prepared = self._with_frozen(parts, prepared)
                prepared = self._with_old(parts, prepared)
                prepared = parts.trainer.finish(prepared, num_rollouts=[update.num_rollouts for update in useful])
                metrics |= parts.trainer.train(step, prepared, num_loss_tokens=num_loss_tokens)
        moved, self._moved = self._moved, {}
        return metrics | moved | parts.spans.drain() | _peak_memory(parts.mesh)

    def save(self, step: int, directory: Path, *, hf_directory: Path | None) -> None:
        parts = self._parts("save", BackendState.AWAKE)
        self.finish_save()
        is_async = parts.cfg.checkpoint.async_save
        copies = parts.stage if is_async else parts.swap
        tensors = tensors_to_save(parts.policy, parts.optimizer)
        if is_async or parts.mesh.device.type == "cuda":
            copies.hold([*_local_shards(parts.policy), *parts.optimizer.state_tensors()])
        state = copy_state(
            tensors,
            parts.mesh,
            copies.host_view,
            host_mesh=parts.host_mesh,
            step=step,
            optimizer_steps=parts.trainer.optimizer_steps,
        )
        if is_async:
            self._write = BackgroundWrite(partial(write, directory, state, parts.mesh, group=parts.save_group))
        else:
            try:
                write(directory, state, parts.mesh)
            finally:
                copies.release()
        if hf_directory is not None:
            export_hf(parts.policy, parts.mesh, parts.source, hf_directory)

    def is_save_done(self) -> bool:
        return self._write is None or self._write.is_done

    def finish_save(self) -> None:
        if self._write is None:
            return
        parts = self._parts("finish a save", BackendState.AWAKE, BackendState.ASLEEP)
        pending, self._write = self._write, None
        try:
            pending.wait()
        finally:
            parts.stage.release()

    def fingerprint(self) -> dict[str, int]:
        parts = self._parts("take fingerprints", BackendState.AWAKE)
        return live_sums(parts.policy, parts.optimizer, parts.mesh)

    def sleep(self) -> None:
        parts = self._parts("sleep", BackendState.AWAKE)
        parts.optimizer.zero_grad()
        if parts.mesh.device.type == "cuda":
            copied = parts.swap.offload([*_local_shards(parts.policy), *parts.optimizer.state_tensors()])
            _free_what_is_left()
            self._moved |= _move_metrics("sleep", copied)
            self._moved["sleep/gpu_reserved_bytes"] = float(torch.cuda.memory_reserved())
        self._state = BackendState.ASLEEP

    def wake_up(self) -> None:
        parts = self._parts("wake up", BackendState.ASLEEP)
        copied = parts.swap.restore()
        if copied.num_bytes > 0:
            self._moved |= _move_metrics("wake", copied)
        self._state = BackendState.AWAKE

    def _parts(self, action: str, *states: BackendState) -> _Parts:
        if self._built is None or self._state not in states:
            raise TrainError(f"cannot {action}: the backend is {self._state}, it must be {' or '.join(states)}")
        return self._built

    def _with_frozen(self, parts: _Parts, updates: list[list[MicroBatch]]) -> list[list[MicroBatch]]:
        for frozen in parts.frozen:
            frozen.swap.restore()
            updates = [_with(step, frozen.column, parts.trainer.score(frozen.model, step)) for step in updates]
            frozen.rest(parts.mesh.device)
        return updates

    def _with_old(self, parts: _Parts, updates: list[list[MicroBatch]]) -> list[list[MicroBatch]]:
        """Score the policy before it moves, where the objective has to know: `Objective.needs_old`."""
        needs_old = parts.trainer.objective.needs_old
        return [
            _with(step, "old_logp_T", parts.trainer.score(parts.policy, step)) if needs_old(number) else step
            for number, step in enumerate(updates)
        ]


def compute_dtype(dtype: Literal["auto", "float32", "bfloat16"], device: Literal["cpu", "cuda"]) -> torch.dtype:
    """What forward and backward compute in."""
    if dtype == "auto":
        return torch.bfloat16 if device == "cuda" else torch.float32
    return torch.float32 if dtype == "float32" else torch.bfloat16


def _frozen_models(cfg: RunConfig, mesh: RankMesh, dtype: torch.dtype) -> Iterator[FrozenModel]:
    """Reference and teacher, as the objective needs them, at rest. Collective."""
    wanted: list[tuple[Literal["ref_logp_T", "teacher_logp_T"], str]] = []
    if cfg.needs_reference:
        wanted.append(("ref_logp_T", cfg.model.ref_load or cfg.model.hf_checkpoint))
    if cfg.needs_teacher:
        assert cfg.distill.opd_teacher_load is not None
        wanted.append(("teacher_logp_T", cfg.distill.opd_teacher_load))
    for column, path in wanted:
        model = _build(cfg, CheckpointReader(Path(path)), mesh, dtype, trainable=False, load_weights=True)
        _check_scoring(model, mesh, dtype)
        frozen = FrozenModel(column=column, model=model, swap=HostSwap(mesh.device))
        frozen.rest(mesh.device)
        yield frozen


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

    def plan(model: ScoringModel) -> BlockPlan:
        if not trainable:
            return BlockPlan(is_compiled=is_compiled(cfg.train.torch_compile, mesh.device))
        return choose_blocks(cfg, model, mesh, dtype)

    model = build_model(
        source.path,
        cfg.model,
        mesh,
        attention=attention,
        compute_dtype=dtype,
        trainable=trainable,
        plan=plan,
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
    reshard(policy)
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


def _reserve_host_memory(cfg: RunConfig, policy: ScoringModel, swap: HostSwap, stage: HostSwap) -> None:
    """Begin to pin what sleeping and saving will fill: masters and two moments of their size."""
    shards = list(_local_shards(policy))
    room = 3 * sum(shard.nbytes for shard in shards) + 8 * ALIGNMENT * len(shards)
    if cfg.cluster.colocate and cfg.starts_engines:
        swap.reserve(room)
    if cfg.checkpoint.async_save:
        stage.reserve(room)


def _free_what_is_left() -> None:
    """Give back what this process would keep for later: workspaces of matrix products, cached blocks."""
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def _move_metrics(name: str, copied: Copied) -> MetricSet:
    return {f"{name}/num_bytes": float(copied.num_bytes), f"{name}/gb_per_s": copied.gb_per_s}


def _peak_memory(mesh: RankMesh) -> MetricSet:
    """Largest memory of any rank in GiB: of the GPU during this call, or of the process since it started.
    Collective.
    """
    if mesh.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated() / 1024**3
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
    return {"memory/train_peak_gib": max_over_shards(torch.tensor([peak]), mesh).item()}
