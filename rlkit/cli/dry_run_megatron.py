"""`--dry-run` with `--train-backend megatron`: every group, layers of every stage, memory of GPUs and hosts by part.
Called by `dry_run.py`.
"""

from collections.abc import Iterator
from pathlib import Path

from rlkit.algo.memory_plan import GIB
from rlkit.backends.megatron.architecture import Architecture, read_architecture
from rlkit.cli.dry_run_phases import planned_hardware
from rlkit.cli.megatron_layout import MegatronLayout, layout_lines, megatron_layout, written
from rlkit.cli.megatron_memory import (
    DEFAULT_LOGIT_ROWS,
    MegatronJob,
    Parts,
    cache_tokens,
    engine_parts,
    fullest_node,
    generation_parts,
    host_parts,
    node_stages,
    stage_params,
    training_parts,
    update_parts,
)
from rlkit.cli.megatron_params import total_params
from rlkit.config.errors import ConfigError
from rlkit.config.quantization import read_quantization
from rlkit.config.rules.megatron_model import megatron_layout_is_possible
from rlkit.config.schema import RunConfig
from rlkit.orchestration.layout import Layout

MAX_ENGINES_SHOWN = 4


def require_possible(cfg: RunConfig) -> None:
    """ConfigError with every constraint that the layout breaks."""
    problems = megatron_layout_is_possible(cfg)
    if problems:
        raise ConfigError("\n".join(problems))


def group_lines(cfg: RunConfig, layout: Layout) -> Iterator[str]:
    """Training groups and stages, then the GPUs of each engine."""
    architecture = _architecture(cfg)
    if architecture is None:
        yield f"  not known: {cfg.model.hf_checkpoint} has no config.json"
        return
    yield from layout_lines(megatron_layout(cfg, architecture.num_layers))
    passed = cfg.engine.sglang
    for engine in layout.engines[:MAX_ENGINES_SHOWN]:
        where = f"nodes {layout.node_of(engine.slots[0])}-{layout.node_of(engine.slots[-1])}"
        axes = _engine_axes(passed, len(engine.slots))
        yield f"  engine {engine.index:<7}GPUs {written(engine.slots)} ({where}){axes}"
    if len(layout.engines) > MAX_ENGINES_SHOWN:
        yield f"  ... {len(layout.engines) - MAX_ENGINES_SHOWN} more engines"


def memory_lines(cfg: RunConfig) -> Iterator[str]:
    """By stage: parameters and the peak of a step; then update, generation, host."""
    architecture = _architecture(cfg)
    if architecture is None:
        yield f"  not known: {cfg.model.hf_checkpoint} has no config.json"
        return
    job = megatron_job(cfg, architecture)
    hardware = planned_hardware(cfg)
    yield f"  {total_params(architecture):,} parameters (counted from config.json, without draft layers)"
    yield f"  longest pack on a rank: {job.num_tokens:,} tokens; estimates, tokens dealt evenly to experts"
    for stage in range(job.layout.pipeline):
        params = stage_params(job, stage)
        yield (
            f"  stage {stage}: {params.total / 1e9:.2f} B parameters on a rank ({params.expert / 1e9:.2f} B of experts)"
        )
        yield from _peak("train", training_parts(job, stage), hardware.gpu_bytes)
    if job.engine_width:
        yield f"  engine, a GPU: weights {_sum(engine_parts(job))}"
        if job.is_colocated:
            yield from _peak("update", update_parts(job), hardware.gpu_bytes)
        yield from _peak("generate", generation_parts(job), hardware.gpu_bytes)
        yield from _cache_lines(cfg, job)
    yield from _host_lines(job, hardware.host_bytes)


def megatron_job(cfg: RunConfig, architecture: Architecture) -> MegatronJob:
    """The sizes that memory follows from."""
    sizes, hardware = cfg.megatron, planned_hardware(cfg)
    # a longer sample runs alone
    longest = -(-_longest_sample(cfg) // cfg.train.context_parallel_size)
    return MegatronJob(
        architecture=architecture,
        layout=megatron_layout(cfg, architecture.num_layers),
        gpus_per_node=cfg.cluster.actor_num_gpus_per_node,
        num_tokens=max(cfg.train.max_tokens_per_gpu, longest),
        has_sequence_parallel=sizes.sequence_parallel,
        runs_per_rank=sizes.virtual_pipeline_size or 1,
        recompute=sizes.recompute_granularity,
        recompute_method=sizes.recompute_method,
        recompute_layers=sizes.recompute_num_layers,
        logit_rows=cfg.train.log_probs_chunk_size or DEFAULT_LOGIT_ROWS,
        optimizer_on_host=sizes.optimizer_cpu_offload,
        num_frozen=cfg.needs_reference + cfg.needs_teacher,
        bucket_bytes=cfg.sync.update_weight_buffer_size,
        is_colocated=cfg.cluster.colocate and cfg.starts_engine_processes,
        engine_width=cfg.cluster.rollout_num_gpus_per_engine if cfg.starts_engine_processes else 0,
        engine_flags=cfg.engine.sglang,
        is_fp8=read_quantization(cfg.model.hf_checkpoint) is not None,
        gpu_bytes=hardware.gpu_bytes,
        static_share=hardware.static_share,
    )


def _architecture(cfg: RunConfig) -> Architecture | None:
    folder = Path(cfg.model.hf_checkpoint)
    return read_architecture(folder) if (folder / "config.json").is_file() else None


def _longest_sample(cfg: RunConfig) -> int:
    longest = (cfg.data.rollout_max_prompt_len or 0) + cfg.rollout.rollout_max_response_len
    context = cfg.rollout.rollout_max_context_len
    return longest if context is None else min(longest, context)


def _engine_axes(passed: dict, width: int) -> str:
    """How SGLang shares the model over them."""
    words = [f"tensor {width // passed.get('pp_size', 1)}"]
    if passed.get("enable_dp_attention"):
        words.append(f"attention in {passed.get('dp_size', 1)} data-parallel parts")
    for name, word in (("ep_size", "expert"), ("pp_size", "pipeline")):
        if passed.get(name, 1) > 1:
            words.append(f"{word} {passed[name]}")
    return ": " + ", ".join(words)


def _peak(phase: str, parts: Parts, capacity: int | None) -> Iterator[str]:
    total = sum(parts.values())
    share = "" if capacity is None else f", {total / capacity:.0%} of {capacity / GIB:.1f}"
    yield f"    {phase:<9}{total / GIB:6.1f} GiB{share} = {_sum(parts)}"
    if capacity is not None and total > capacity:
        yield f"    DOES NOT FIT: {phase} needs {total / GIB:.1f} GiB of {capacity / GIB:.1f}; {_remedy(parts)}"


def _remedy(parts: Parts) -> str:
    """What makes the largest part smaller."""
    largest = max(parts, key=lambda name: parts[name])
    return {
        "optimizer": "pass --optimizer-cpu-offload, or take more nodes",
        "activations": "pass --recompute-granularity full --recompute-method uniform --recompute-num-layers 1, lower"
        " --max-tokens-per-gpu or raise --context-parallel-size",
        "engine weights": "raise --rollout-num-gpus-per-engine and --sglang-ep-size",
        "KV cache": "lower --sglang-mem-fraction-static",
        "logits": "lower --log-probs-chunk-size",
    }.get(largest, "raise --expert-model-parallel-size or --pipeline-model-parallel-size, or take more nodes")


def _cache_lines(cfg: RunConfig, job: MegatronJob) -> Iterator[str]:
    tokens = cache_tokens(job)
    if tokens is None:
        yield "    KV cache: not known without --gpu-type and --sglang-mem-fraction-static"
        return
    longest = _longest_sample(cfg)
    parts = job.engine_flags.get("dp_size", 1) if job.engine_flags.get("enable_dp_attention") else 1
    yield (
        f"    KV cache of an engine: {parts} x {tokens:,} tokens, {parts * (tokens // longest):,} samples of"
        f" {longest:,} tokens"
    )
    if tokens < longest:
        yield f"    DOES NOT FIT: a sample of {longest:,} tokens; raise --sglang-mem-fraction-static"


def _host_lines(job: MegatronJob, capacity: int | None) -> Iterator[str]:
    node = fullest_node(job)
    parts = host_parts(job, node_stages(job, node))
    if not parts:
        return
    total = sum(parts.values())
    share = "" if capacity is None else f", {total / capacity:.0%} of {capacity / GIB:.0f}"
    yield f"  host, fullest node ({node}): {total / GIB:.0f} GiB{share} = {_sum(parts, digits=0)}"
    yield "    processes, Ray's object store, page cache and SGLang's own host memory come on top"
    if capacity is not None and total > capacity:
        yield f"    DOES NOT FIT: {total / GIB:.0f} GiB of {capacity / GIB:.0f}; take more nodes"


def _sum(parts: Parts, *, digits: int = 1) -> str:
    return " + ".join(f"{size / GIB:.{digits}f} {name}" for name, size in parts.items())


def megatron_layout_of(cfg: RunConfig) -> MegatronLayout:
    """The layout of a configuration whose config.json is there; for tests and other tools."""
    architecture = _architecture(cfg)
    assert architecture is not None
    return megatron_layout(cfg, architecture.num_layers)
