"""Sharding, offload, adapters and half precision of the FSDP backend."""

from rlkit.config.fields import all_fields
from rlkit.config.schema import RunConfig


def copies_split_the_ranks(cfg: RunConfig) -> str | None:
    copies, ranks, context = cfg.fsdp.fsdp_replicate_size, cfg.cluster.actor_num_gpus, cfg.train.context_parallel_size
    if not cfg.starts_trainer or copies == 1:
        return None
    if ranks % copies != 0:
        return (
            f"fsdp_replicate_size = {copies} does not divide the {ranks} training ranks; change --fsdp-replicate-size"
            " or --actor-num-gpus-per-node"
        )
    if ranks // copies % context != 0:
        return (
            f"fsdp_replicate_size = {copies} leaves {ranks // copies} ranks to a copy, which context_parallel_size ="
            f" {context} does not divide; lower --fsdp-replicate-size or --context-parallel-size"
        )
    return None


def async_saves_copy_to_the_host(cfg: RunConfig) -> str | None:
    if not cfg.checkpoint.async_save or cfg.fsdp.fsdp_state_dict_cpu_offload:
        return None
    return (
        "async_save = True writes while training goes on, from a copy in host memory, but fsdp_state_dict_cpu_offload ="
        " False makes none; drop --no-fsdp-state-dict-cpu-offload or --async-save"
    )


def adapters_are_switched_on(cfg: RunConfig) -> str | None:
    """Settings of adapters that do not exist would be read by nobody."""
    if cfg.uses_lora:
        return None
    settings = {
        "lora_alpha": cfg.lora.lora_alpha,
        "lora_dropout": cfg.lora.lora_dropout,
        "lora_target_modules": cfg.lora.lora_target_modules,
    }
    for name, value in settings.items():
        if value != all_fields()[name].default:
            return f"{name} = {value} has no effect because lora_rank = 0; pass --lora-rank or drop {_flag(name)}"
    return None


def adapters_are_what_is_trained(cfg: RunConfig) -> str | None:
    optimizer = cfg.optimizer
    names = optimizer.only_train_params_name_list + optimizer.freeze_params_name_list
    if not cfg.uses_lora or not names:
        return None
    return (
        f"lora_rank = {cfg.lora.lora_rank} trains the adapters and nothing else, so the names {' '.join(names)} have"
        " no effect; choose layers with --lora-target-modules"
    )


def adapters_have_targets(cfg: RunConfig) -> str | None:
    if not cfg.uses_lora:
        return None
    targets = cfg.lora.lora_target_modules
    if not targets:
        return "lora_target_modules is empty; name linear layers, or pass --lora-target-modules all-linear"
    if "all-linear" in targets and len(targets) > 1:
        return (
            f"lora_target_modules = {' '.join(targets)}: all-linear stands alone; pass --lora-target-modules all-linear"
        )
    heads = [name for name in targets if name.rpartition(".")[2] in ("lm_head", "embed_tokens")]
    if heads:
        return (
            f"lora_target_modules names {heads[0]}: log-probs read the head's weight without its layer, and embeddings"
            " are no linear layer; pass --lora-target-modules with layers of the blocks"
        )
    return None


def loss_scale_needs_fp16(cfg: RunConfig) -> str | None:
    precision = cfg.precision
    if precision.fp16:
        if cfg.model.dtype != "auto":
            return f"fp16 = True and dtype = {cfg.model.dtype} disagree; drop --fp16 or --dtype"
        adaptive = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
        changed = [name for name in adaptive if getattr(precision, name) != all_fields()[name].default]
        if precision.loss_scale is not None and changed:
            return (
                f"loss_scale = {precision.loss_scale} is fixed, so {changed[0]} = {getattr(precision, changed[0])} has"
                f" no effect; drop --loss-scale or {_flag(changed[0])}"
            )
        if precision.min_loss_scale > precision.initial_loss_scale:
            return (
                f"min_loss_scale = {precision.min_loss_scale} is above initial_loss_scale ="
                f" {precision.initial_loss_scale}; lower --min-loss-scale"
            )
        return None
    names = ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
    for name in names:
        if getattr(precision, name) != all_fields()[name].default:
            return f"{name} = {getattr(precision, name)} has no effect because fp16 = False; pass --fp16 or drop" + (
                f" {_flag(name)}"
            )
    return None


def other_backends_have_no_fsdp(cfg: RunConfig) -> str | None:
    if cfg.train.train_backend == "fsdp":
        return None
    values = {
        "fsdp_replicate_size": cfg.fsdp.fsdp_replicate_size,
        "fsdp_cpu_offload": cfg.fsdp.fsdp_cpu_offload,
        "fsdp_full_params": cfg.fsdp.fsdp_full_params,
        "fsdp_state_dict_cpu_offload": cfg.fsdp.fsdp_state_dict_cpu_offload,
        "lora_rank": cfg.lora.lora_rank,
    }
    for name, value in values.items():
        if value != all_fields()[name].default:
            return (
                f"{name} = {value} belongs to the FSDP backend, and train_backend = {cfg.train.train_backend};"
                f" pass --train-backend fsdp or drop {_flag(name)}"
            )
    return None


def on_policy_mode_computes_in_one_way(cfg: RunConfig) -> str | None:
    """What `algo/batch_invariant.py` does not cover."""
    if not cfg.train.true_on_policy_mode:
        return None
    obstacles = {
        f"device = {cfg.cluster.device}": cfg.cluster.device == "cuda",
        f"rollout_engine = {cfg.engine.rollout_engine}": cfg.engine.rollout_engine == "sglang",
        f"dtype = {cfg.dtype_name}": cfg.dtype_name not in ("auto", "float32"),
        f"torch_compile = {cfg.train.torch_compile}": cfg.train.torch_compile == "on",
        f"context_parallel_size = {cfg.train.context_parallel_size}": cfg.train.context_parallel_size > 1,
        f"lora_rank = {cfg.lora.lora_rank}": cfg.uses_lora,
        f"attn_implementation = {cfg.model.attn_implementation}": cfg.model.attn_implementation != "auto",
        f"train_backend = {cfg.train.train_backend}": cfg.train.train_backend != "fsdp",
    }
    found = [obstacle for obstacle, is_there in obstacles.items() if is_there]
    if not found:
        return None
    return (
        f"true_on_policy_mode = True gives trainer and embedded engine the same bits in float32 on a CPU, but"
        f" {', '.join(found)}; drop that, or drop --true-on-policy-mode and correct the gap with --use-tis"
    )


def _flag(name: str) -> str:
    return all_fields()[name].flag


RULES = (
    other_backends_have_no_fsdp,
    copies_split_the_ranks,
    async_saves_copy_to_the_host,
    adapters_are_switched_on,
    adapters_are_what_is_trained,
    adapters_have_targets,
    loss_scale_needs_fp16,
    on_policy_mode_computes_in_one_way,
)
