"""The FSDP2 backend: one training rank behind the functions of `backends/base.py`. Read `trainer.py` for what
happens in a step.
"""

import logging
import os
import resource
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import torch
from torch import Tensor

from rlkit.backends.fsdp.checkpoint import load_checkpoint, tensors_to_save
from rlkit.backends.fsdp.compilation import is_compiled, keep_compiled_code
from rlkit.backends.fsdp.critic import Critic
from rlkit.backends.fsdp.export import export_hf
from rlkit.backends.fsdp.fingerprint import live_sums, state_sums
from rlkit.backends.fsdp.frozen import (
    FrozenModel,
    build_scoring_model,
    check_scoring,
    compute_dtype,
    frozen_models,
    local_shards,
    moving_reference,
    refresh_reference,
    score_frozen,
    with_column,
)
from rlkit.backends.fsdp.lora import lora_scaling
from rlkit.backends.fsdp.model import ScoringModel, local_shard, max_positions, named_shards, saved_tensors
from rlkit.backends.fsdp.optimizer import ShardOptimizer
from rlkit.backends.fsdp.saving import StateSaver
from rlkit.backends.fsdp.trainer import MicroBatch, Trainer, micro_batch
from rlkit.backends.fsdp.weights import FsdpWeights
from rlkit.backends.loading import CheckpointReader
from rlkit.backends.schedules import Schedule
from rlkit.backends.sleep import ALIGNMENT, Copied, HostSwap
from rlkit.config.schema import RunConfig
from rlkit.dist.collectives import max_over_ranks
from rlkit.dist.groups import RankMesh, init_process_group
from rlkit.observability.spans import SpanName, Spans
from rlkit.types.batches import Update
from rlkit.types.errors import TrainError
from rlkit.types.gaps import NO_GAPS, TokenGaps
from rlkit.types.ranks import InitReport, MetricSet, RankInfo
from rlkit.types.weights import WeightSource

logger = logging.getLogger(__name__)


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
    frozen: list[FrozenModel]
    critic: Critic | None
    optimizer: ShardOptimizer
    trainer: Trainer
    source: CheckpointReader
    weights: FsdpWeights
    swap: HostSwap
    saver: StateSaver
    spans: Spans
    max_positions: int | None


class FsdpBackend:
    """See `backends.base.Backend`."""

    def __init__(self) -> None:
        self._state = BackendState.NEW
        self._built: _Parts | None = None
        self._moved: MetricSet = {}

    @property
    def weights(self) -> WeightSource:
        return self._parts("read the weights", BackendState.AWAKE, BackendState.ASLEEP).weights

    def init(self, cfg: RunConfig, rank: RankInfo, *, resume_from: Path | None) -> InitReport:
        if self._state is not BackendState.NEW:
            raise TrainError(f"init called on a backend that is {self._state}; make a new one")
        start = time.perf_counter()
        if rank.device == "cpu" or cfg.fsdp.fsdp_cpu_offload:
            # threads would cut tensors where the engine's do not
            torch.set_num_threads(1 if cfg.train.true_on_policy_mode else rank.num_threads)
        torch.manual_seed(cfg.train.seed + rank.rank)
        timeout_s = 60.0 * cfg.train.distributed_timeout_minutes
        mesh = init_process_group(rank, timeout_s=timeout_s, num_copies=cfg.fsdp.fsdp_replicate_size)
        if is_compiled(cfg.train.torch_compile, mesh.device):
            keep_compiled_code(os.environ)
        dtype = compute_dtype(cfg, rank.device)
        source = CheckpointReader(Path(cfg.model.hf_checkpoint))
        policy = build_scoring_model(cfg, source, mesh, dtype, trainable=True, load_weights=resume_from is None)
        optimizer = ShardOptimizer(policy, cfg.optimizer)
        meta = None
        if resume_from is not None:
            meta = load_checkpoint(
                resume_from,
                policy,
                optimizer,
                mesh,
                with_optimizer=not cfg.checkpoint.no_load_optim,
                lora=cfg.lora if cfg.uses_lora else None,
            )
        check_scoring(policy, mesh, dtype)
        frozen = list(frozen_models(cfg, mesh, dtype, policy=policy, resume_from=resume_from))
        spans, swap, critic = Spans(), HostSwap(mesh.device), None
        if cfg.needs_critic:
            critic = Critic(cfg, mesh, dtype, spans, policy=policy, resume_from=resume_from, meta=meta)
        saver = StateSaver(cfg, mesh, swap, timeout_s=timeout_s)
        if mesh.device.type == "cuda":
            _reserve_host_memory(cfg, policy, swap, saver.stage)
        self._built = _Parts(
            cfg=cfg,
            mesh=mesh,
            policy=policy,
            frozen=frozen,
            critic=critic,
            optimizer=optimizer,
            trainer=Trainer(
                cfg,
                policy=policy,
                optimizer=optimizer,
                mesh=mesh,
                spans=spans,
                schedule=Schedule.of(cfg),
                resumed=meta if not cfg.checkpoint.no_load_optim else None,
            ),
            source=source,
            weights=FsdpWeights(policy, mesh, dtype_of=dtype, read=swap.host_view, lora_scaling=lora_scaling(cfg.lora)),
            swap=swap,
            saver=saver,
            spans=spans,
            max_positions=max_positions(policy.config),
        )
        self._state = BackendState.AWAKE
        return InitReport(
            num_params=sum(shard.numel() for _, shard in named_shards(policy)),
            num_saved_params=sum(tensor.numel() for _, tensor in saved_tensors(policy)),
            num_critic_params=critic.num_params if critic is not None else 0,
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
                prepared = score_frozen(parts.frozen, parts.trainer, prepared, parts.mesh.device)
                prepared = self._with_old(parts, prepared)
                num_rollouts = [update.num_rollouts for update in useful]
                if parts.critic is None:
                    prepared = parts.trainer.finish(prepared, num_rollouts=num_rollouts)
                else:
                    with parts.critic.awake():
                        prepared = parts.critic.with_values(prepared)
                        prepared = parts.trainer.finish(prepared, num_rollouts=num_rollouts)
                        metrics |= parts.critic.train(step, prepared, num_loss_tokens=num_loss_tokens)
                if parts.critic is None or step >= parts.cfg.critic.num_critic_only_steps:
                    metrics |= parts.trainer.train(step, prepared, num_loss_tokens=num_loss_tokens)
        interval = parts.cfg.model.ref_update_interval
        if interval is not None and (step + 1) % interval == 0:
            refresh_reference(parts.frozen, parts.policy, parts.mesh.device)
        moved, self._moved = self._moved, {}
        return metrics | moved | parts.spans.drain() | _peak_memory(parts.mesh)

    def token_gaps(self) -> TokenGaps:
        parts = self._parts("read differences", BackendState.AWAKE)
        return NO_GAPS if parts.mesh.context_rank > 0 else parts.trainer.gaps.read()

    def save(self, step: int, directory: Path, *, hf_directory: Path | None) -> None:
        parts = self._parts("save", BackendState.AWAKE)
        critic, meta = parts.critic, parts.trainer.meta(step)
        if critic is not None:
            meta = replace(meta, critic_optimizer_steps=critic.optimizer_steps)
        with _beside(parts) as others:
            parts.saver.save(directory, tensors_to_save(parts.policy, parts.optimizer) | others, meta)
            if critic is not None:
                critic.export(step)
        if hf_directory is not None:
            export_hf(parts.policy, parts.mesh, parts.source, hf_directory, lora=parts.cfg.lora)

    def is_save_done(self) -> bool:
        return self._parts("ask for a save", BackendState.AWAKE, BackendState.ASLEEP).saver.is_done

    def finish_save(self) -> None:
        self._parts("finish a save", BackendState.AWAKE, BackendState.ASLEEP).saver.finish()

    def fingerprint(self) -> dict[str, int]:
        parts = self._parts("take fingerprints", BackendState.AWAKE)
        with _beside(parts) as others:
            return live_sums(parts.policy, parts.optimizer, parts.mesh) | state_sums(others, parts.mesh)

    def sleep(self) -> None:
        parts = self._parts("sleep", BackendState.AWAKE)
        parts.optimizer.zero_grad()
        if parts.mesh.device.type == "cuda":
            own = [*local_shards(parts.policy), *parts.optimizer.state_tensors()]
            copied = parts.swap.offload([tensor for tensor in own if tensor.is_cuda])  # none with --fsdp-cpu-offload
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

    def _with_old(self, parts: _Parts, updates: list[list[MicroBatch]]) -> list[list[MicroBatch]]:
        """Score the policy before it moves, where the objective has to know: `Objective.needs_old`."""
        needs_old = parts.trainer.objective.needs_old
        return [
            with_column(step, "old_logp_T", parts.trainer.score(parts.policy, step)) if needs_old(number) else step
            for number, step in enumerate(updates)
        ]


@contextmanager
def _beside(parts: _Parts) -> Iterator[dict[str, Tensor]]:
    """What a checkpoint holds beside the policy, by name: the critic, and a reference that moves; on the device
    meanwhile.
    """
    with ExitStack() as stack:
        others: dict[str, Tensor] = {}
        if parts.critic is not None:
            stack.enter_context(parts.critic.awake())
            others |= parts.critic.tensors()
        if parts.cfg.model.ref_update_interval is not None:
            others |= stack.enter_context(moving_reference(parts.frozen, parts.mesh.device))
        yield others


def _check_lengths(updates: list[Update], limit: int | None) -> None:
    longest = max((batch.max_seqlen for update in updates for batch in update.micro_batches), default=0)
    if limit is not None and longest > limit:
        raise TrainError(
            f"a sample of {longest} tokens exceeds the model's max_position_embeddings = {limit}; "
            "lower --rollout-max-context-len (or prompt and response lengths)"
        )


def _reserve_host_memory(cfg: RunConfig, policy: ScoringModel, swap: HostSwap, stage: HostSwap) -> None:
    """Begin to pin what sleeping and saving will fill: masters, and two moments of the size of those that are
    trained.
    """
    shards = [shard for _, shard in named_shards(policy)]
    room = sum(local_shard(shard).nbytes * (3 if shard.requires_grad else 1) for shard in shards)
    room += 8 * ALIGNMENT * len(shards)
    if cfg.cluster.colocate and cfg.starts_engines and not cfg.fsdp.fsdp_cpu_offload:
        swap.reserve(room)
    if cfg.checkpoint.async_save and not cfg.fsdp.fsdp_full_params:
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
    return {"memory/train_peak_gib": max_over_ranks(torch.tensor([peak]), mesh).item()}
