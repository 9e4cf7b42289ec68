"""The bytes of a run that follow from its configuration alone: parameters, gradients, optimizer states, engine weights.

Activations, logits, the KV cache and communication buffers depend on the run and are not guessed here.
"""

from collections.abc import Iterator

from rlkit.cli.model_size import ModelSize, model_size
from rlkit.config.gpu_memory import GPU_MEMORY_GIB
from rlkit.config.schema import RunConfig

_GIB = 1024**3
_MASTER, _GRADIENT, _ADAM = 4, 4, 8
"""Bytes per parameter: float32 weights and gradients, two float32 moments."""


def memory_lines(cfg: RunConfig) -> Iterator[str]:
    """The sums, against the memory of the GPU where that is known."""
    size = model_size(cfg.model.hf_checkpoint)
    if size is None:
        yield f"  not known: the size of {cfg.model.hf_checkpoint} cannot be read here"
        return
    yield f"  {size.num_params:,} parameters (counted from {size.source})"
    if cfg.starts_trainer:
        yield from _trainer_lines(cfg, size)
    if cfg.starts_engines:
        yield from _engine_lines(cfg, size)
    yield "  activations, logits, KV cache and buffers come on top"


def gpu_memory_gib(cfg: RunConfig) -> float | None:
    """Memory of the planned GPU: given, or known for its name."""
    if cfg.cluster.gpu_memory_gib is not None:
        return cfg.cluster.gpu_memory_gib
    return GPU_MEMORY_GIB.get((cfg.cluster.gpu_type or "").upper())


def _trainer_lines(cfg: RunConfig, size: ModelSize) -> Iterator[str]:
    ranks = cfg.cluster.actor_num_gpus
    per_rank = {
        name: each * size.num_params / ranks / _GIB
        for name, each in (("float32 weights", _MASTER), ("gradients", _GRADIENT), ("Adam moments", _ADAM))
    }
    if cfg.needs_reference:
        per_rank["reference model"] = _compute_bytes(cfg) * size.num_params / ranks / _GIB
    if cfg.needs_teacher and cfg.distill.opd_teacher_load is not None:
        teacher = model_size(cfg.distill.opd_teacher_load)
        if teacher is None:
            yield f"  not known: the size of the teacher {cfg.distill.opd_teacher_load} cannot be read here"
        else:
            per_rank["teacher model"] = _compute_bytes(cfg) * teacher.num_params / ranks / _GIB
    total = sum(per_rank.values())
    terms = " + ".join(f"{gib:.2f} {name}" for name, gib in per_rank.items())
    yield f"  trainer: {total:.2f} GiB per rank{_share(cfg, total)} = {terms}"
    if cfg.cluster.colocate and cfg.starts_engines:
        asleep = (_MASTER + _ADAM) * size.num_params / ranks / _GIB
        yield f"  trainer asleep: {asleep:.2f} GiB of host memory per rank, while engines generate"


def _engine_lines(cfg: RunConfig, size: ModelSize) -> Iterator[str]:
    width = cfg.cluster.rollout_num_gpus_per_engine
    weights = _compute_bytes(cfg) * size.num_params / width / _GIB
    place = "GPU of an engine" if width > 1 else "engine"
    yield f"  engine weights: {weights:.2f} GiB per {place}{_share(cfg, weights)}"


def _compute_bytes(cfg: RunConfig) -> int:
    """Bytes per parameter in engines and in the reference model."""
    if cfg.dtype_name == "auto":
        return 4 if cfg.cluster.device == "cpu" else 2
    return 4 if cfg.dtype_name == "float32" else 2


def _share(cfg: RunConfig, gib: float) -> str:
    memory = gpu_memory_gib(cfg)
    if memory is None:
        return ""
    name = cfg.cluster.gpu_type or "GPU"
    verdict = ", which does not fit" if gib >= memory else ""
    return f" ({gib / memory:.0%} of {memory:g} GiB, {name}{verdict})"
