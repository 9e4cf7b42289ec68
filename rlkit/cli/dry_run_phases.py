"""`--dry-run`: the estimated peak of each phase against what a GPU and a host hold, as bars, and what to change when
it does not fit. The sums are `algo/phase_memory.py`'s.
"""

from collections.abc import Iterator
from dataclasses import replace

from rlkit.algo.memory_plan import GIB, ModelShape, model_shape
from rlkit.algo.phase_memory import Hardware, MemoryPlan, Peak, longest_pack, longest_sample, plan_memory
from rlkit.cli.dry_run_memory import gpu_memory_gib
from rlkit.cli.machine import cuda_devices, host_memory_bytes
from rlkit.cli.model_size import model_size
from rlkit.config.rules.paths import read_model_config
from rlkit.config.schema import RunConfig
from rlkit.engines.sglang.memory import colocated_fraction

BAR_WIDTH = 16
NUM_NAMED_PARTS = 3
MIN_TOKENS = 256
MAX_RANKS = 4096
GPUS_OF_A_NODE = 8


def phase_lines(cfg: RunConfig) -> Iterator[str]:
    """One line a phase and place, then what to do where it does not fit."""
    shape = policy_shape(cfg)
    if shape is None:
        yield "  not estimated: that needs the FSDP backend and the config.json of a dense decoder"
        return
    hardware = planned_hardware(cfg)
    frozen = frozen_params(cfg)
    plan = plan_memory(cfg, shape, hardware, frozen_params=frozen)
    if hardware.device == "cuda" and hardware.gpu_bytes is None:
        yield "  no size of a GPU to compare with: pass --gpu-type or --gpu-memory-gib"
    if cfg.starts_trainer:
        yield (
            f"  longest pack on a rank: {longest_pack(cfg):,} tokens; {plan.num_checkpointed} of {shape.num_layers}"
            " blocks recompute their activations"
        )
    for place, peaks in plan.places.items():
        capacity = hardware.host_bytes if place == "host" else hardware.gpu_bytes
        size = "" if capacity is None else f", {capacity / GIB:.1f} GiB"
        yield f"  {place}{size}"
        for peak in peaks:
            yield f"    {peak.phase:<9}{_bar(peak, capacity)}{peak.num_bytes / GIB:7.1f} GiB  {_parts(peak)}"
    yield from _cache_lines(cfg, plan, hardware)
    for problem in memory_problems(cfg, shape, hardware, frozen_params=frozen):
        yield f"  DOES NOT FIT: {problem}"


def policy_shape(cfg: RunConfig) -> ModelShape | None:
    """Of `--hf-checkpoint`, where its folder tells it and the backend is the one whose memory is known."""
    if cfg.train.train_backend != "fsdp":
        return None
    config, size = read_model_config(cfg.model.hf_checkpoint), model_size(cfg.model.hf_checkpoint)
    return None if config is None or size is None else model_shape(config, size.num_params)


def frozen_params(cfg: RunConfig) -> int:
    """Parameters of reference and teacher, as far as they can be read."""
    folders: list[str] = []
    if cfg.needs_reference:
        folders.append(cfg.model.ref_load or cfg.model.hf_checkpoint)
    if cfg.needs_teacher and cfg.distill.opd_teacher_load is not None:
        folders.append(cfg.distill.opd_teacher_load)
    sizes = [model_size(folder) for folder in folders]
    return sum(size.num_params for size in sizes if size is not None)


def planned_hardware(cfg: RunConfig) -> Hardware:
    """As the flags say; what they leave out is this machine's, where it has the planned device."""
    here = cuda_devices()
    if cfg.cluster.device == "cpu":
        gpu_bytes = None
    elif (gib := gpu_memory_gib(cfg)) is not None:
        gpu_bytes = int(gib * GIB)
    else:
        gpu_bytes = min((device.num_bytes for device in here), default=None)
    is_here = cfg.cluster.device == "cpu" or bool(here)
    host_bytes = host_memory_bytes() if is_here else None
    if cfg.cluster.host_memory_gib is not None:
        host_bytes = int(cfg.cluster.host_memory_gib * GIB)
    share = cfg.engine.sglang.get("mem_fraction_static")
    if share is None and cfg.cluster.colocate and gpu_bytes is not None:
        share = colocated_fraction(gpu_bytes, bucket_bytes=cfg.sync.update_weight_buffer_size)
    return Hardware(
        device="cpu" if cfg.cluster.device == "cpu" else "cuda",
        gpu_bytes=gpu_bytes,
        host_bytes=host_bytes,
        static_share=share,
    )


def memory_problems(cfg: RunConfig, shape: ModelShape, hardware: Hardware, *, frozen_params: int = 0) -> Iterator[str]:
    """A sentence for each place that is too small, with the change that makes room, tried by the same estimate."""
    plan = plan_memory(cfg, shape, hardware, frozen_params=frozen_params)
    for place in plan.places:
        capacity = hardware.host_bytes if place == "host" else hardware.gpu_bytes
        worst = plan.worst(place)
        if capacity is None or worst.num_bytes <= capacity:
            continue
        sums = f"{worst.phase} needs {worst.num_bytes / GIB:.1f} GiB of {capacity / GIB:.1f} on {_the(place)}"
        remedy = (
            _host_remedy(cfg, worst) if place == "host" else _gpu_remedy(cfg, shape, hardware, place, frozen_params)
        )
        yield f"{sums}; {remedy}"
    if (tight := _cache_problem(cfg, hardware, plan)) is not None:
        yield tight


def _gpu_remedy(cfg: RunConfig, shape: ModelShape, hardware: Hardware, place: str, frozen: int) -> str:
    """Changes that the same estimate says are enough: of one flag where that does it, else of several."""

    def fits(changed: RunConfig) -> bool:
        plan = plan_memory(changed, shape, hardware, frozen_params=frozen)
        assert hardware.gpu_bytes is not None
        return place not in plan.places or plan.worst(place).num_bytes <= hardware.gpu_bytes

    worst = plan_memory(cfg, shape, hardware, frozen_params=frozen).worst(place).phase
    if worst == "generate":
        return "lower --sglang-mem-fraction-static, or give an engine more GPUs (--rollout-num-gpus-per-engine)"
    if worst == "sync":
        return "lower --update-weight-buffer-size or --sglang-mem-fraction-static"
    first = ""
    if cfg.train.gradient_checkpointing is False:
        cfg = replace(cfg, train=replace(cfg.train, gradient_checkpointing=None))
        if fits(cfg):
            return "drop --no-gradient-checkpointing"
        first = "drop --no-gradient-checkpointing and "
    found = [
        next((f"lower --max-tokens-per-gpu to {tokens}" for tokens, c in _shorter_packs(cfg) if fits(c)), None),
        next((f"train on more GPUs: {flags}" for flags, c in _more_ranks(cfg) if fits(c)), None),
        next((f"share samples: --context-parallel-size {size}" for size, c in _wider_context(cfg) if fits(c)), None),
    ]
    if not any(found):
        both = (
            f"train on more GPUs with smaller packs: {flags} --max-tokens-per-gpu {tokens}"
            for flags, wider in _more_ranks(cfg)
            for tokens, smaller in _shorter_packs(wider)
            if fits(smaller)
        )
        found.append(next(both, None))
    if cfg.fsdp.fsdp_cpu_offload is False and fits(replace(cfg, fsdp=replace(cfg.fsdp, fsdp_cpu_offload=True))):
        found.append("pass --fsdp-cpu-offload (slow)")
    said = [remedy for remedy in found if remedy is not None]
    return first + (" or ".join(said) if said else "take a smaller model, shorter responses or larger GPUs")


def _shorter_packs(cfg: RunConfig) -> Iterator[tuple[int, RunConfig]]:
    """Half of `--max-tokens-per-gpu`, a quarter, ..., as long as a sample of full length still fits into one."""
    tokens = cfg.train.max_tokens_per_gpu // 2
    while tokens >= max(MIN_TOKENS, longest_sample(cfg) // cfg.train.context_parallel_size):
        yield tokens, replace(cfg, train=replace(cfg.train, max_tokens_per_gpu=tokens))
        tokens //= 2


def _more_ranks(cfg: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """Twice as many training ranks, four times, ..., on as few nodes as may be."""
    ranks, per_node = 2 * cfg.cluster.actor_num_gpus, max(cfg.cluster.num_gpus_per_node, GPUS_OF_A_NODE)
    while ranks <= MAX_RANKS:
        nodes = max(1, ranks // per_node)
        each = ranks // nodes
        cluster = replace(
            cfg.cluster, actor_num_nodes=nodes, actor_num_gpus_per_node=each, num_gpus_per_node=max(each, per_node)
        )
        yield f"--actor-num-nodes {nodes} --actor-num-gpus-per-node {each}", replace(cfg, cluster=cluster)
        ranks *= 2


def _wider_context(cfg: RunConfig) -> Iterator[tuple[int, RunConfig]]:
    """More ranks that share a sample, where a single one is longer than a pack."""
    size = 2 * cfg.train.context_parallel_size
    while size <= cfg.cluster.actor_num_gpus and longest_sample(cfg) > cfg.train.max_tokens_per_gpu * size // 2:
        yield size, replace(cfg, train=replace(cfg.train, context_parallel_size=size))
        size *= 2


def _host_remedy(cfg: RunConfig, worst: Peak) -> str:
    found: list[str] = []
    if cfg.checkpoint.async_save:
        found.append("drop --async-save, which keeps a copy of the checkpoint")
    if "activations" in worst.parts and worst.parts["activations"] > worst.num_bytes // 4:
        found.append("lower --max-tokens-per-gpu")
    if "KV cache" in worst.parts and worst.parts["KV cache"] > worst.num_bytes // 4:
        found.append("lower --embedded-max-running-requests")
    return " or ".join([*found, "spread the ranks over more nodes (--actor-num-nodes)"])


def _cache_lines(cfg: RunConfig, plan: MemoryPlan, hardware: Hardware) -> Iterator[str]:
    """How many samples of full length the engine's cache holds at once."""
    cache = _cache_bytes(plan)
    if cache is None or hardware.static_share is None:
        return
    tokens = cache // plan.kv_bytes_per_token
    yield f"  KV cache of an engine: {tokens:,} tokens, {tokens // longest_sample(cfg):,} samples of full length"


def _cache_problem(cfg: RunConfig, hardware: Hardware, plan: MemoryPlan) -> str | None:
    cache = _cache_bytes(plan)
    if cache is None or hardware.static_share is None or cache >= longest_sample(cfg) * plan.kv_bytes_per_token:
        return None
    need = longest_sample(cfg) * plan.kv_bytes_per_token / GIB
    return (
        f"the KV cache of an engine, {cache / GIB:.1f} GiB, is too small for one sample of"
        f" {longest_sample(cfg):,} tokens ({need:.1f} GiB); raise --rollout-num-gpus-per-engine or"
        " --sglang-mem-fraction-static"
    )


def _cache_bytes(plan: MemoryPlan) -> int | None:
    for place, peaks in plan.places.items():
        for peak in peaks:
            if place != "host" and peak.phase == "generate":
                return peak.parts["KV cache"]
    return None


def _the(place: str) -> str:
    return "a host" if place == "host" else f"the {place}"


def _bar(peak: Peak, capacity: int | None) -> str:
    if capacity is None:
        return ""
    share = peak.num_bytes / capacity
    filled = min(BAR_WIDTH, round(BAR_WIDTH * share))
    over = ">" if share > 1 else "|"
    return f"|{'#' * filled}{'.' * (BAR_WIDTH - filled)}{over}{share:5.0%}"


def _parts(peak: Peak) -> str:
    """The largest parts."""
    largest = sorted(peak.parts.items(), key=lambda part: -part[1])[:NUM_NAMED_PARTS]
    return " + ".join(f"{size / GIB:.1f} {name}" for name, size in largest if size >= 0.05 * GIB)
