"""Placement, engines and the way weights travel between trainer and engines."""

import re
from typing import Any

from rlkit.config.gpu_memory import GPU_MEMORY_GIB
from rlkit.config.schema import RunConfig
from rlkit.config.values import nearest

_ADDRESS = re.compile(r"[^\s:/]+:\d+")


def node_holds_its_ranks(cfg: RunConfig) -> str | None:
    ranks, gpus = cfg.cluster.actor_num_gpus_per_node, cfg.cluster.num_gpus_per_node
    if not cfg.starts_trainer or ranks <= gpus:
        return None
    return (
        f"actor_num_gpus_per_node = {ranks} is more than num_gpus_per_node = {gpus};"
        f" pass a smaller --actor-num-gpus-per-node, or --num-gpus-per-node {ranks} if nodes have that many"
    )


def engines_have_gpus(cfg: RunConfig) -> str | None:
    if not cfg.starts_engine_processes or cfg.cluster.colocate or cfg.cluster.rollout_num_gpus is not None:
        return None
    return (
        "rollout_num_gpus is unset and colocate is off, so engines have no GPUs;"
        " pass --rollout-num-gpus N for GPUs of their own, or --colocate to share the trainer's"
    )


def engines_divide_their_gpus(cfg: RunConfig) -> str | None:
    gpus, width = cfg.cluster.engine_num_gpus, cfg.cluster.rollout_num_gpus_per_engine
    if not cfg.starts_engine_processes or gpus == 0 or gpus % width == 0:
        return None
    origin = "rollout_num_gpus" if cfg.cluster.rollout_num_gpus is not None else "colocated training ranks"
    return (
        f"{origin} = {gpus} is not a multiple of rollout_num_gpus_per_engine = {width}:"
        f" {gpus % width} GPUs would idle; change --rollout-num-gpus or --rollout-num-gpus-per-engine"
    )


def shared_gpus_hold_the_engines(cfg: RunConfig) -> str | None:
    gpus, ranks = cfg.cluster.rollout_num_gpus, cfg.cluster.actor_num_gpus
    if not cfg.cluster.colocate or gpus is None or not (cfg.starts_engines and cfg.starts_trainer) or gpus <= ranks:
        return None
    return (
        f"colocate shares the {ranks} GPUs of the trainer, but rollout_num_gpus = {gpus};"
        f" pass --rollout-num-gpus {ranks} or less, or drop --colocate"
    )


def engines_stay_on_their_nodes(cfg: RunConfig) -> str | None:
    width, per_node = cfg.cluster.rollout_num_gpus_per_engine, cfg.cluster.slots_per_node
    if not cfg.starts_engine_processes or cfg.cluster.engine_num_gpus % width:
        return None
    if width > per_node and width % per_node:
        return (
            f"rollout_num_gpus_per_engine = {width} is more than the {per_node} GPUs of a node, but not a whole number"
            f" of nodes; use a --rollout-num-gpus-per-engine that is a multiple of {per_node}, or at most {per_node}"
        )
    first = cfg.cluster.actor_num_gpus if cfg.starts_trainer and not cfg.cluster.colocate else 0
    for index in range(cfg.cluster.num_engines):
        begin = first + index * width
        end = begin + width - 1
        fits = begin // per_node == end // per_node if width <= per_node else begin % per_node == 0
        if not fits:
            return (
                f"engine {index} (rollout_num_gpus_per_engine = {width}) would lie across a node boundary: GPUs"
                f" {begin} to {end} with {per_node} GPUs to a node; use an engine size that divides {per_node},"
                " and put engines behind a whole number of them (--rollout-num-gpus-per-engine,"
                " --actor-num-gpus-per-node)"
            )
    return None


def transport_fits_placement(cfg: RunConfig) -> str | None:
    transport = cfg.sync.update_weight_transport
    if not (cfg.starts_engines and cfg.starts_trainer):
        return None
    if transport in ("nccl", "gloo") and cfg.cluster.colocate:
        return (
            f"update_weight_transport = {transport} cannot serve colocate = True: two processes on one GPU cannot share"
            " an NCCL group, and gloo would copy through the host; use --update-weight-transport ipc"
        )
    if transport == "ipc" and not cfg.cluster.colocate:
        return (
            "update_weight_transport = ipc needs trainer and engines on the same GPUs, but colocate is off;"
            " use --update-weight-transport nccl or disk, or --colocate"
        )
    return None


def disk_folder_needs_disk_transport(cfg: RunConfig) -> str | None:
    folder, transport = cfg.sync.update_weight_disk_dir, cfg.sync.update_weight_transport
    if folder is None or transport == "disk":
        return None
    return (
        f"update_weight_disk_dir = {folder} has no effect with update_weight_transport = {transport};"
        " pass --update-weight-transport disk or drop --update-weight-disk-dir"
    )


def retracted_requests_need_running_engines(cfg: RunConfig) -> str | None:
    mode = cfg.sync.pause_generation_mode
    if mode != "retract" or not cfg.cluster.colocate:
        return None
    return (
        f"pause_generation_mode = {mode} has no effect with colocate = True: engines sleep while weights change, so"
        " nothing runs that could be held back; drop --pause-generation-mode or --colocate"
    )


def sleeping_engines_are_updated_every_step(cfg: RunConfig) -> str | None:
    interval = cfg.sync.update_weights_interval
    if interval == 1 or not cfg.cluster.colocate or not (cfg.starts_engines and cfg.starts_trainer):
        return None
    return (
        f"update_weights_interval = {interval} cannot work with colocate = True: engines lose their weights while they"
        " sleep; drop --update-weights-interval or --colocate"
    )


def evaluation_sees_the_newest_weights(cfg: RunConfig) -> str | None:
    every, interval = cfg.evaluation.eval_interval, cfg.sync.update_weights_interval
    if every is None or interval == 1 or every % interval == 0:
        return None
    return (
        f"eval_interval = {every} is not a multiple of update_weights_interval = {interval}, so evaluations would"
        " measure older weights than their step; change --eval-interval or --update-weights-interval"
    )


def external_engines_have_addresses(cfg: RunConfig) -> str | None:
    addresses = cfg.engine.rollout_external_engine_addrs
    for address in addresses:
        if not _ADDRESS.fullmatch(address):
            return (
                f"rollout_external_engine_addrs: {address!r} is not host:port; write --rollout-external-engine-addrs"
                " 10.0.0.5:30000 10.0.0.6:30000"
            )
        if addresses.count(address) > 1:
            return f"rollout_external_engine_addrs has {address} twice; --rollout-external-engine-addrs names each once"
    return None


def external_engines_are_left_alone(cfg: RunConfig) -> str | None:
    if not cfg.engine.rollout_external_engine_addrs or not cfg.starts_engines:
        return None
    engine, cluster = cfg.engine, cfg.cluster
    remedy = "drop it, or --rollout-external-engine-addrs"
    if cluster.colocate:
        return f"colocate = True needs engines that rlkit starts and puts to sleep; {remedy} (--colocate)"
    if cluster.rollout_num_gpus is not None:
        return f"rollout_num_gpus = {cluster.rollout_num_gpus}, but external engines take no GPUs of the run; {remedy}"
    if cluster.rollout_num_gpus_per_engine != 1:
        width = cluster.rollout_num_gpus_per_engine
        return f"rollout_num_gpus_per_engine = {width}, but external engines say themselves what they are; {remedy}"
    if engine.use_fault_tolerance:
        return f"use_fault_tolerance = True cannot restart engines that rlkit did not start; {remedy}"
    if engine.sglang:
        names = ", ".join(f"sglang_{name}" for name in engine.sglang)
        return f"{names}: external engines have been started with their own flags; {remedy}"
    return None


def restarted_engines_are_on_one_node(cfg: RunConfig) -> str | None:
    if not cfg.engine.use_fault_tolerance or not cfg.starts_engine_processes:
        return None
    if not cfg.starts_trainer:
        return (
            "use_fault_tolerance = True gives a restarted engine the trainer's weights, but debug_rollout_only = True"
            " has no trainer; drop --use-fault-tolerance"
        )
    width, per_node = cfg.cluster.rollout_num_gpus_per_engine, cfg.cluster.slots_per_node
    if width > per_node:
        return (
            f"use_fault_tolerance = True restarts engines of one node, but rollout_num_gpus_per_engine = {width} spans"
            f" {-(-width // per_node)} of {per_node} GPUs; drop --use-fault-tolerance"
        )
    return None


def embedded_engine_is_one_gpu(cfg: RunConfig) -> str | None:
    width, engine = cfg.cluster.rollout_num_gpus_per_engine, cfg.engine.rollout_engine
    embedded = engine == "embedded" or (engine == "auto" and cfg.cluster.device == "cpu")
    if not cfg.starts_engines or not embedded or width == 1:
        return None
    return (
        f"rollout_num_gpus_per_engine = {width}, but the embedded engine (rollout_engine = {engine}, device ="
        f" {cfg.cluster.device}) is not tensor parallel; use --rollout-num-gpus-per-engine 1 or --rollout-engine sglang"
    )


def sglang_flags_need_sglang(cfg: RunConfig) -> str | None:
    if cfg.engine.rollout_engine != "embedded" or not cfg.engine.sglang:
        return None
    names = ", ".join(f"sglang_{name}" for name in cfg.engine.sglang)
    return f"rollout_engine = embedded ignores {names}; drop them or use --rollout-engine sglang"


def sglang_device_is_the_device(cfg: RunConfig) -> str | None:
    device, passed = cfg.cluster.device, cfg.engine.sglang.get("device")
    if device == "cpu" and cfg.engine.rollout_engine == "sglang" and passed != "cpu":
        return (
            f"device = cpu and rollout_engine = sglang, but sglang_device = {passed or 'unset'};"
            " pass --sglang-device cpu"
        )
    if passed is not None and device in ("cuda", "cpu") and passed != device:
        return f"sglang_device = {passed}, but device = {device}; make --sglang-device and --device the same"
    return None


def sglang_parallel_sizes_fit(cfg: RunConfig) -> str | None:
    width = cfg.cluster.rollout_num_gpus_per_engine
    passed = cfg.engine.sglang
    for name in ("pp_size", "dp_size", "ep_size"):
        if passed.get(name, 1) < 1:
            return f"sglang_{name} = {passed[name]} must be at least 1; set --sglang-{name.replace('_', '-')}"
    pipeline, data, experts = passed.get("pp_size", 1), passed.get("dp_size", 1), passed.get("ep_size", 1)
    if width % pipeline:
        return _does_not_divide("pp_size", pipeline, "rollout_num_gpus_per_engine", width)
    tensor = width // pipeline
    if data > 1 and not passed.get("enable_dp_attention"):
        return (
            f"sglang_dp_size = {data} without data-parallel attention would start {data} replicas inside one engine;"
            " pass --sglang-enable-dp-attention too, or let --rollout-num-gpus decide how many engines there are"
        )
    for name, size in (("dp_size", data), ("ep_size", experts)):
        if tensor % size:
            return _does_not_divide(name, size, "tensor parallel size rollout_num_gpus_per_engine / pp_size", tensor)
    return None


def sglang_memory_is_a_fraction(cfg: RunConfig) -> str | None:
    fraction: Any = cfg.engine.sglang.get("mem_fraction_static")
    if fraction is None or 0 < fraction < 1:
        return None
    return f"sglang_mem_fraction_static = {fraction} must be above 0 and below 1; e.g. --sglang-mem-fraction-static 0.7"


def flash_attention_has_its_dtype(cfg: RunConfig) -> str | None:
    model, device = cfg.model, cfg.cluster.device
    if not model.attn_implementation.startswith("flash_attention") or not cfg.starts_trainer:
        return None
    if device == "cpu":
        return (
            f"attn_implementation = {model.attn_implementation} has no kernel for device = cpu;"
            " use --attn-implementation sdpa or auto"
        )
    if model.dtype == "float32":
        return (
            f"attn_implementation = {model.attn_implementation} computes in half precision, but dtype = float32;"
            " use --dtype bfloat16, or --attn-implementation sdpa"
        )
    return None


def gpu_is_known(cfg: RunConfig) -> str | None:
    name = cfg.cluster.gpu_type
    if name is None or cfg.cluster.gpu_memory_gib is not None or name.upper() in GPU_MEMORY_GIB:
        return None
    close = nearest(name.upper(), GPU_MEMORY_GIB)
    hint = f"did you mean --gpu-type {close}?" if close else f"known are {', '.join(GPU_MEMORY_GIB)}."
    return f"gpu_type = {name} is no GPU whose memory is known; {hint} For others pass --gpu-memory-gib as well"


def attention_shares_its_context(cfg: RunConfig) -> str | None:
    cp = cfg.train.context_parallel_size
    if cfg.model.attn_implementation != "flash_attention_3" or cp <= 1 or not cfg.starts_trainer:
        return None
    return (
        f"attn_implementation = flash_attention_3 cannot do context_parallel_size = {cp};"
        " use --attn-implementation flash_attention_2, sdpa or auto"
    )


def _does_not_divide(name: str, size: int, whole: str, number: int) -> str:
    flag = f"--sglang-{name.replace('_', '-')}"
    return f"sglang_{name} = {size} does not divide {whole} = {number}; pass a {flag} that divides it"


RULES = (
    node_holds_its_ranks,
    engines_have_gpus,
    engines_divide_their_gpus,
    shared_gpus_hold_the_engines,
    engines_stay_on_their_nodes,
    transport_fits_placement,
    disk_folder_needs_disk_transport,
    retracted_requests_need_running_engines,
    sleeping_engines_are_updated_every_step,
    evaluation_sees_the_newest_weights,
    external_engines_have_addresses,
    external_engines_are_left_alone,
    restarted_engines_are_on_one_node,
    embedded_engine_is_one_gpu,
    attention_shares_its_context,
    sglang_flags_need_sglang,
    sglang_device_is_the_device,
    sglang_parallel_sizes_fit,
    sglang_memory_is_a_fraction,
    flash_attention_has_its_dtype,
    gpu_is_known,
)
