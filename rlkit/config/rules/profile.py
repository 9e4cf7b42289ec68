"""Environment, profiler and memory snapshots of training ranks."""

import re

from rlkit.config.rules.required import trains
from rlkit.config.schema import RunConfig

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DEVICES = ("CUDA_VISIBLE_DEVICES", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES")


def environment_is_made_of_strings(cfg: RunConfig) -> str | None:
    for name, value in cfg.cluster.train_env_vars.items():
        if not _NAME.fullmatch(name):
            return f"train_env_vars: {name!r} is no name of an environment variable; correct --train-env-vars"
        if not isinstance(value, str):
            return (
                f"train_env_vars: {name} = {value!r} is no string; put the value in quotation marks in --train-env-vars"
            )
        if name in _DEVICES:
            return (
                f"train_env_vars: {name} would move the ranks off the GPUs that they were given; drop it from"
                " --train-env-vars and choose GPUs in the environment that starts the run"
            )
    return None


def profiled_steps_are_some(cfg: RunConfig) -> str | None:
    first, end = cfg.profile.profile_step_start, cfg.profile.profile_step_end
    if not cfg.profile.use_pytorch_profiler or first < end:
        return None
    return f"profile_step_start = {first} is not before profile_step_end = {end}; raise --profile-step-end"


def profiled_steps_are_run(cfg: RunConfig) -> str | None:
    first, last = cfg.profile.profile_step_start, cfg.rollout.num_rollout
    if not cfg.profile.use_pytorch_profiler or last is None or first < last:
        return None
    return (
        f"profile_step_start = {first} is never reached: num_rollout = {last} ends before it;"
        " lower --profile-step-start and --profile-step-end"
    )


def something_is_there_to_profile(cfg: RunConfig) -> str | None:
    used = {
        "use_pytorch_profiler": cfg.profile.use_pytorch_profiler,
        "record_memory_history": cfg.profile.record_memory_history,
        "train_env_vars": bool(cfg.cluster.train_env_vars),
    }
    names = [name for name, is_used in used.items() if is_used]
    if not names or trains(cfg):
        return None
    flags = ", ".join(f"--{name.replace('_', '-')}" for name in names)
    return f"{', '.join(names)}: the run has no training rank; drop {flags}"


def profiled_ranks_exist(cfg: RunConfig) -> str | None:
    ranks, count = cfg.profile.profile_ranks, cfg.cluster.actor_num_gpus
    is_used = cfg.profile.use_pytorch_profiler or cfg.profile.record_memory_history
    if not is_used or max(ranks, default=0) < count:
        return None
    return (
        f"profile_ranks = {' '.join(map(str, ranks))}: the run has training ranks 0 to {count - 1};"
        " correct --profile-ranks"
    )


def memory_history_is_of_cuda(cfg: RunConfig) -> str | None:
    if not cfg.profile.record_memory_history or cfg.cluster.device != "cpu":
        return None
    return "record_memory_history records CUDA allocations, but device = cpu; drop --record-memory-history"


def snapshots_are_taken(cfg: RunConfig) -> str | None:
    folder = cfg.profile.memory_snapshot_dir
    if folder is None or cfg.profile.record_memory_history:
        return None
    return f"memory_snapshot_dir = {folder} has no effect without a recording; pass --record-memory-history"


RULES = (
    environment_is_made_of_strings,
    profiled_steps_are_some,
    profiled_steps_are_run,
    something_is_there_to_profile,
    profiled_ranks_exist,
    memory_history_is_of_cuda,
    snapshots_are_taken,
)
