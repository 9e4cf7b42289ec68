"""The Megatron-Core backend: one training rank behind the functions of `backends/base.py`. Read `trainer.py` for what
happens in a step, `names.py` for how Hugging Face weights and Megatron's belong together.
"""

import logging
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from rlkit.backends.attention.packed import choose_attention
from rlkit.backends.hf_writer import MAX_FILE_BYTES, HfWriter, copy_companions
from rlkit.backends.loading import CheckpointReader
from rlkit.backends.megatron.architecture import Architecture, read_architecture
from rlkit.backends.megatron.batches import MicroBatch, micro_batch
from rlkit.backends.megatron.checkpoint import load_state, save_state
from rlkit.backends.megatron.fingerprint import live_sums
from rlkit.backends.megatron.loading import load_hf_weights
from rlkit.backends.megatron.model import Model, build_model
from rlkit.backends.megatron.names import Entry
from rlkit.backends.megatron.optimizer import MainOptimizer, wrap_for_gradients
from rlkit.backends.megatron.parallel import Ranks, join
from rlkit.backends.megatron.trainer import Runnable, Trainer
from rlkit.backends.megatron.weights import MegatronWeights
from rlkit.backends.schedules import Schedule
from rlkit.backends.sleep import HostSwap
from rlkit.config.schema import RunConfig
from rlkit.dist.collectives import barrier, max_over_ranks
from rlkit.observability.spans import SpanName, Spans
from rlkit.types.batches import Update
from rlkit.types.errors import CheckpointError, TrainError
from rlkit.types.gaps import NO_GAPS, TokenGaps
from rlkit.types.ranks import InitReport, MetricSet, RankInfo
from rlkit.types.weights import WeightSource

logger = logging.getLogger(__name__)

BUCKET_BYTES = 1024**3


class BackendState(StrEnum):
    NEW = "new"
    AWAKE = "awake"
    ASLEEP = "asleep"


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenModel:
    """A model that scores and is never trained: reference or teacher. On the GPU only while it scores."""

    column: Literal["ref_logp_T", "teacher_logp_T"]
    """Field of `PackedBatch` that it fills."""
    runnable: Runnable
    swap: HostSwap

    def rest(self, device: torch.device) -> None:
        if device.type == "cuda":
            self.swap.offload(parameter.data for _, parameter in self.runnable.model.named_parameters())
            torch.cuda.empty_cache()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Parts:
    """What exists from `init` on."""

    cfg: RunConfig
    ranks: Ranks
    policy: Model
    frozen: list[FrozenModel]
    optimizer: MainOptimizer
    trainer: Trainer
    runnable: Runnable
    source: CheckpointReader
    weights: MegatronWeights
    swap: HostSwap
    spans: Spans


class MegatronBackend:
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
        if rank.device == "cpu":
            torch.set_num_threads(rank.num_threads)
        torch.manual_seed(cfg.train.seed + rank.rank)
        ranks = join(cfg, rank, timeout_s=60.0 * cfg.train.distributed_timeout_minutes)
        dtype = compute_dtype(cfg, rank.device)
        source = CheckpointReader(Path(cfg.model.hf_checkpoint))
        policy = _build(cfg, source.path, ranks, dtype, trainable=True)
        wrapped = wrap_for_gradients(policy, ranks)
        optimizer = MainOptimizer(policy, wrapped, ranks, cfg.optimizer, on_host=cfg.megatron.optimizer_cpu_offload)
        steps, resumed_step = 0, None
        if resume_from is not None:
            with_optimizer = not cfg.checkpoint.no_load_optim
            meta = load_state(resume_from, policy, optimizer, ranks, with_optimizer=with_optimizer)
            steps, resumed_step = meta["optimizer_steps"] if with_optimizer else 0, meta["step"]
        else:
            load_hf_weights(policy, source, ranks)
            optimizer.main_from_params()
        spans, swap = Spans(), HostSwap(ranks.device)
        runnable = Runnable(model=policy, chunks=wrapped)
        self._built = _Parts(
            cfg=cfg,
            ranks=ranks,
            policy=policy,
            frozen=list(_frozen_models(cfg, ranks, dtype)),
            optimizer=optimizer,
            trainer=Trainer(
                cfg,
                policy=runnable,
                optimizer=optimizer,
                ranks=ranks,
                spans=spans,
                schedule=Schedule.of(cfg),
                optimizer_steps=steps,
            ),
            runnable=runnable,
            source=source,
            weights=MegatronWeights(policy, ranks, local=_reader(policy, swap)),
            swap=swap,
            spans=spans,
        )
        self._state = BackendState.AWAKE
        return InitReport(
            num_params=sum(spec.num_bytes // spec.dtype.itemsize for spec in self._built.weights.specs()),
            resumed_step=resumed_step,
            memory_plan=_layout_sentence(cfg, ranks),
            seconds=time.perf_counter() - start,
        )

    def train(self, step: int, updates: list[Update]) -> MetricSet:
        parts = self._parts("train", BackendState.AWAKE)
        _check_lengths(updates, parts.policy.architecture)
        useful = [update for update in updates if update.num_loss_tokens > 0]
        if len(useful) < len(updates):
            logger.warning(
                f"step {step}: {len(updates) - len(useful)} of {len(updates)} optimizer steps have nothing to train on"
            )
        if parts.ranks.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        num_loss_tokens = [update.num_loss_tokens for update in useful]
        metrics: MetricSet = {
            "train/num_tokens": float(sum(num_loss_tokens)),
            "train/num_optimizer_steps": float(len(useful)),
        }
        if useful:
            with parts.spans(SpanName.TRAIN):
                prepared = [
                    [
                        micro_batch(batch, parts.ranks, parts.cfg).to(parts.ranks.device)
                        for batch in update.micro_batches
                    ]
                    for update in useful
                ]
                prepared = self._with_frozen(parts, prepared)
                prepared = self._with_old(parts, prepared)
                prepared = parts.trainer.finish(prepared, num_rollouts=[update.num_rollouts for update in useful])
                metrics |= parts.trainer.train(step, prepared, num_loss_tokens=num_loss_tokens)
        moved, self._moved = self._moved, {}
        return metrics | moved | parts.spans.drain() | _peak_memory(parts.ranks)

    def token_gaps(self) -> TokenGaps:
        parts = self._parts("read differences", BackendState.AWAKE)
        ranks = parts.ranks
        speaks = ranks.is_last_stage and ranks.tensor.rank == 0 and ranks.mesh.context_rank == 0
        return parts.trainer.gaps.read() if speaks else NO_GAPS

    def save(self, step: int, directory: Path, *, hf_directory: Path | None) -> None:
        parts = self._parts("save", BackendState.AWAKE)
        save_state(
            directory,
            parts.policy,
            parts.optimizer,
            parts.ranks,
            step=step,
            optimizer_steps=parts.trainer.optimizer_steps,
        )
        if hf_directory is not None:
            export_hf(parts.policy, parts.optimizer, parts.ranks, parts.source, hf_directory)

    def is_save_done(self) -> bool:
        self._parts("ask for a save", BackendState.AWAKE, BackendState.ASLEEP)
        return True  # `save` waits; a rule refuses --async-save

    def finish_save(self) -> None:
        self._parts("finish a save", BackendState.AWAKE, BackendState.ASLEEP)

    def fingerprint(self) -> dict[str, int]:
        parts = self._parts("take fingerprints", BackendState.AWAKE)
        return live_sums(parts.policy, parts.optimizer, parts.ranks)

    def sleep(self) -> None:
        parts = self._parts("sleep", BackendState.AWAKE)
        parts.optimizer.zero_grad()
        if parts.ranks.device.type == "cuda":
            copied = parts.swap.offload(_state_tensors(parts))
            parts.optimizer.free_grads()
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
            self._moved |= {"sleep/num_bytes": float(copied.num_bytes), "sleep/gb_per_s": copied.gb_per_s}
            self._moved["sleep/gpu_reserved_bytes"] = float(torch.cuda.memory_reserved())
        self._state = BackendState.ASLEEP

    def wake_up(self) -> None:
        parts = self._parts("wake up", BackendState.ASLEEP)
        copied = parts.swap.restore()
        if parts.ranks.device.type == "cuda":
            parts.optimizer.restore_grads()
            self._moved |= {"wake/num_bytes": float(copied.num_bytes), "wake/gb_per_s": copied.gb_per_s}
        self._state = BackendState.AWAKE

    def _parts(self, action: str, *states: BackendState) -> _Parts:
        if self._built is None or self._state not in states:
            raise TrainError(f"cannot {action}: the backend is {self._state}, it must be {' or '.join(states)}")
        return self._built

    def _with_frozen(self, parts: _Parts, updates: list[list[MicroBatch]]) -> list[list[MicroBatch]]:
        for frozen in parts.frozen:
            frozen.swap.restore()
            updates = [_with(step, frozen.column, parts.trainer.score(frozen.runnable, step)) for step in updates]
            frozen.rest(parts.ranks.device)
        return updates

    def _with_old(self, parts: _Parts, updates: list[list[MicroBatch]]) -> list[list[MicroBatch]]:
        """Score the policy before it moves, where the objective has to know: `Objective.needs_old`."""
        needs_old = parts.trainer.objective.needs_old
        return [
            _with(step, "old_logp_T", parts.trainer.score(parts.runnable, step)) if needs_old(number) else step
            for number, step in enumerate(updates)
        ]


def compute_dtype(cfg: RunConfig, device: Literal["cpu", "cuda"]) -> torch.dtype:
    """What forward and backward compute in; parameters have it too, main parameters are float32."""
    if cfg.dtype_name == "auto":
        return torch.bfloat16 if device == "cuda" else torch.float32
    assert cfg.dtype_name != "float16", "a rule refuses it"
    return torch.float32 if cfg.dtype_name == "float32" else torch.bfloat16


def export_hf(
    model: Model,
    optimizer: MainOptimizer,
    ranks: Ranks,
    source: CheckpointReader,
    directory: Path,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write the main parameters as a Hugging Face checkpoint with the dtypes of `source`. Collective; rank 0 writes.

    `config.json` is written last: a folder without it is not taken for a checkpoint.
    """
    if directory.resolve() == source.path.resolve():
        raise CheckpointError(f"refusing to export over {directory}: the run started from it; choose another folder")
    tensors = model.tensors()

    def main(entry: Entry) -> Tensor:
        key = (entry.chunk, entry.path)
        if key not in optimizer.groups:
            return tensors[key]
        return optimizer.gather(key, lambda segment: segment.main.detach(), tuple(tensors[key].shape))

    names = [spec.name for spec in MegatronWeights(model, ranks, local=main).specs()]
    weights = MegatronWeights(model, ranks, local=main, dtype_of={name: source.dtype(name) for name in names})
    writer = HfWriter(directory, weights.specs(), max_file_bytes) if ranks.mesh.is_main else None
    for bucket in weights.buckets(BUCKET_BYTES):
        if writer is not None:
            for name, tensor in bucket.tensors():
                writer.add(name, tensor)
    if writer is not None:
        writer.finish()
        copy_companions(source.path, directory)
    barrier()


def _build(cfg: RunConfig, path: Path, ranks: Ranks, dtype: torch.dtype, *, trainable: bool) -> Model:
    attention = choose_attention(cfg.model.attn_implementation, device=ranks.device, dtype=dtype)
    architecture = read_architecture(path)
    return build_model(architecture, cfg, ranks, attention=attention, dtype=dtype, trainable=trainable)


def _frozen_models(cfg: RunConfig, ranks: Ranks, dtype: torch.dtype) -> Iterator[FrozenModel]:
    """Reference and teacher, as the objective needs them, at rest. Collective."""
    wanted: list[tuple[Literal["ref_logp_T", "teacher_logp_T"], str]] = []
    if cfg.needs_reference:
        wanted.append(("ref_logp_T", cfg.model.ref_load or cfg.model.hf_checkpoint))
    if cfg.needs_teacher:
        assert cfg.distill.opd_teacher_load is not None
        wanted.append(("teacher_logp_T", cfg.distill.opd_teacher_load))
    for column, path in wanted:
        model = _build(cfg, Path(path), ranks, dtype, trainable=False)
        load_hf_weights(model, CheckpointReader(Path(path)), ranks)
        runnable = Runnable(model=model, chunks=model.chunks)
        frozen = FrozenModel(column=column, runnable=runnable, swap=HostSwap(ranks.device))
        frozen.rest(ranks.device)
        yield frozen


def _reader(model: Model, swap: HostSwap) -> Callable[[Entry], Tensor]:
    """Finds the values of a parameter on the device or, asleep, on the host."""
    tensors = model.tensors()

    def read(entry: Entry) -> Tensor:
        return swap.host_view(tensors[entry.chunk, entry.path].detach())

    return read


def _state_tensors(parts: _Parts) -> Iterator[Tensor]:
    """What sleeps: parameters, main parameters and moments."""
    for _, parameter in parts.policy.named_parameters():
        yield parameter.data
    yield from parts.optimizer.main_tensors()


def _check_lengths(updates: list[Update], architecture: Architecture) -> None:
    limit = architecture.max_positions
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


def _layout_sentence(cfg: RunConfig, ranks: Ranks) -> str:
    sizes = cfg.megatron
    axes = {
        "tensor": sizes.tensor_model_parallel_size,
        "pipeline": sizes.pipeline_model_parallel_size,
        "context": cfg.train.context_parallel_size,
        "data": ranks.mesh.data_size,
        "expert": sizes.expert_model_parallel_size,
    }
    shared = ", ".join(f"{name} {size}" for name, size in axes.items() if size > 1) or "a single rank"
    manner = sizes.recompute_granularity or ("full" if cfg.train.gradient_checkpointing else "no")
    return f"Megatron-Core: {shared}; {manner} recomputation"


def _peak_memory(ranks: Ranks) -> MetricSet:
    """Largest memory of any rank in GiB: of the GPU during this call, or of the process since it started.
    Collective.
    """
    if ranks.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated() / 1024**3
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
    return {"memory/train_peak_gib": max_over_ranks(torch.tensor([peak]), ranks.mesh).item()}
