"""Builds the modules of a rank that score tokens: the policy, and the frozen ones (reference, teacher). Called by
`backend.py`.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlkit.algo.batch_invariant import make_batch_invariant
from rlkit.backends.attention.packed import PackedAttention, choose_attention
from rlkit.backends.fsdp.checkpoint import load_tensors
from rlkit.backends.fsdp.compilation import is_compiled
from rlkit.backends.fsdp.lora import add_adapters, without_adapters, without_dropout
from rlkit.backends.fsdp.memory import choose_blocks
from rlkit.backends.fsdp.model import (
    BlockPlan,
    ScoringModel,
    build_model,
    freeze,
    initialize_adapters,
    load_hf_weights,
    local_shard,
    named_shards,
    reshard,
    saved_tensors,
)
from rlkit.backends.fsdp.stored import stored_shapes
from rlkit.backends.fsdp.trainer import MicroBatch, Trainer
from rlkit.backends.loading import CheckpointReader
from rlkit.backends.sleep import HostSwap
from rlkit.config.schema import RunConfig
from rlkit.dist.groups import RankMesh
from rlkit.types.errors import ConfigError
from rlkit.types.fingerprints import REFERENCE, WEIGHTS

NUM_CHECKED_TOKENS = 8
MAX_SCORING_GAP = {torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.05}
"""Largest log-prob difference between our scoring and the architecture's own logits that rounding explains."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenModel:
    """A model that scores and is never trained: reference or teacher. On the GPU only while it scores."""

    column: Literal["ref_logp_T", "teacher_logp_T"]
    """Field of `PackedBatch` that it fills."""
    model: ScoringModel
    swap: HostSwap
    is_base: bool = False
    """It is the policy without its adapters, which sleeps and wakes with the policy."""

    def rest(self, device: torch.device) -> None:
        if device.type == "cuda" and not self.is_base:
            self.swap.offload(shard for shard in local_shards(self.model) if shard.is_cuda)
            torch.cuda.empty_cache()


def compute_dtype(cfg: RunConfig, device: Literal["cpu", "cuda"]) -> torch.dtype:
    """What forward and backward compute in."""
    if cfg.dtype_name == "auto":
        return torch.bfloat16 if device == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[cfg.dtype_name]


def frozen_models(
    cfg: RunConfig, mesh: RankMesh, dtype: torch.dtype, *, policy: ScoringModel, resume_from: Path | None
) -> Iterator[FrozenModel]:
    """Reference and teacher, as the objective needs them, at rest. A reference that moves continues from the checkpoint
    `resume_from`, if that holds one. Collective.
    """
    wanted: list[tuple[Literal["ref_logp_T", "teacher_logp_T"], str]] = []
    if cfg.needs_reference and cfg.reference_is_base:
        yield FrozenModel(column="ref_logp_T", model=policy, swap=HostSwap(mesh.device), is_base=True)
    elif cfg.needs_reference:
        wanted.append(("ref_logp_T", cfg.model.ref_load or cfg.model.hf_checkpoint))
    if cfg.needs_teacher:
        assert cfg.distill.opd_teacher_load is not None
        wanted.append(("teacher_logp_T", cfg.distill.opd_teacher_load))
    for column, path in wanted:
        model = build_scoring_model(cfg, CheckpointReader(Path(path)), mesh, dtype, trainable=False, load_weights=True)
        check_scoring(model, mesh, dtype)
        if column == "ref_logp_T" and cfg.model.ref_update_interval is not None:
            _check_same_shapes(model, policy, path)
            if resume_from is not None and any(name.startswith(REFERENCE) for name in stored_shapes(resume_from)):
                load_tensors(resume_from, _reference_tensors(model), mesh)
        frozen = FrozenModel(column=column, model=model, swap=HostSwap(mesh.device))
        frozen.rest(mesh.device)
        yield frozen


def score_frozen(
    frozen: list[FrozenModel], trainer: Trainer, updates: list[list[MicroBatch]], device: torch.device
) -> list[list[MicroBatch]]:
    """The micro-batches with each frozen model's log-probs. Collective."""
    for role in frozen:
        role.swap.restore()
        with without_adapters(role.model) if role.is_base else nullcontext():
            updates = [with_column(step, role.column, trainer.score(role.model, step)) for step in updates]
        role.rest(device)
    return updates


def refresh_reference(frozen: list[FrozenModel], policy: ScoringModel, device: torch.device) -> None:
    """The reference becomes what the policy is now. Both are sharded alike, so every rank copies its own rows."""
    for role in (role for role in frozen if role.column == "ref_logp_T"):
        role.swap.restore()
        with torch.no_grad():
            for (_, old), (_, new) in zip(saved_tensors(role.model), saved_tensors(policy), strict=True):
                _plain(old).copy_(_plain(new))
        role.rest(device)


@contextmanager
def moving_reference(frozen: list[FrozenModel], device: torch.device) -> Iterator[dict[str, Tensor]]:
    """The reference's tensors by their names in a checkpoint; on the device meanwhile."""
    (role,) = (role for role in frozen if role.column == "ref_logp_T")
    role.swap.restore()
    yield _reference_tensors(role.model)
    role.rest(device)


def _reference_tensors(model: ScoringModel) -> dict[str, Tensor]:
    return {f"{REFERENCE}{WEIGHTS}{name}": tensor.detach() for name, tensor in saved_tensors(model)}


def _plain(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _check_same_shapes(reference: ScoringModel, policy: ScoringModel, path: str) -> None:
    theirs, ours = ({name: tuple(x.shape) for name, x in saved_tensors(model)} for model in (reference, policy))
    different = sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name))
    if different:
        name = different[0]
        raise ConfigError(
            f"--ref-update-interval copies the policy into the reference, but {path} is built otherwise: {name} has "
            f"shape {theirs.get(name)} there and {ours.get(name)} here; pass a --ref-load of the policy's architecture"
        )


def build_scoring_model(
    cfg: RunConfig,
    source: CheckpointReader,
    mesh: RankMesh,
    dtype: torch.dtype,
    *,
    trainable: bool,
    load_weights: bool,
) -> ScoringModel:
    model = build_module(cfg, source, mesh, dtype, trainable=trainable)
    if load_weights or cfg.uses_lora:  # a checkpoint of adapters holds them alone
        load_hf_weights(model, source, mesh)
        initialize_adapters(model, mesh, cfg.train.seed)
    return model


def build_module(
    cfg: RunConfig,
    source: CheckpointReader,
    mesh: RankMesh,
    dtype: torch.dtype,
    *,
    trainable: bool,
    kind: type[ScoringModel] = ScoringModel,
    num_resident_bytes: int = 0,
) -> ScoringModel:
    """A module without weights. `num_resident_bytes`: what others keep on the GPU while it is trained."""
    attention = choose_attention(cfg.model.attn_implementation, device=mesh.device, dtype=dtype)
    if cfg.train.true_on_policy_mode:
        attention = PackedAttention.TILED

    is_policy = trainable and kind is ScoringModel

    def adapt(model: ScoringModel) -> None:
        if is_policy and cfg.uses_lora:
            add_adapters(model.hf_model, cfg.lora, dtype_of=source.dtype)
        elif is_policy:
            freeze(model, cfg.optimizer)
        if cfg.train.true_on_policy_mode:
            model.is_batch_invariant = True
            make_batch_invariant(model.hf_model)

    def plan(model: ScoringModel) -> BlockPlan:
        if not trainable:
            return BlockPlan(is_compiled=is_compiled(cfg.train.torch_compile, mesh.device))
        return choose_blocks(cfg, model, mesh, dtype, num_resident_bytes=num_resident_bytes)

    return build_model(
        source.path,
        cfg.model,
        mesh,
        attention=attention,
        compute_dtype=dtype,
        trainable=trainable,
        kind=kind,
        adapt=adapt,
        plan=plan,
        offload=cfg.fsdp.fsdp_cpu_offload,
    )


def check_scoring(policy: ScoringModel, mesh: RankMesh, dtype: torch.dtype) -> None:
    """Some architectures scale or cap their logits after the head. Scoring without that would train on wrong
    log-probs in silence.
    """
    count = min(NUM_CHECKED_TOKENS, policy.config.get_text_config().vocab_size)
    with torch.no_grad(), without_dropout(policy):
        gap = policy.check_scoring(torch.arange(count, device=mesh.device))
    reshard(policy)
    if not gap <= MAX_SCORING_GAP[dtype]:
        raise ConfigError(
            f"{type(policy.hf_model).__name__} changes its logits after the head: log-probs differ by {gap:.3g}; "
            "the FSDP backend does not support this architecture"
        )


def with_column(micro_batches: list[MicroBatch], name: str, values: list[Tensor]) -> list[MicroBatch]:
    return [
        replace(micro, batch=replace(micro.batch, **{name: value}))
        for micro, value in zip(micro_batches, values, strict=True)
    ]


def local_shards(model: ScoringModel) -> Iterator[Tensor]:
    for _, shard in named_shards(model):
        yield local_shard(shard)
