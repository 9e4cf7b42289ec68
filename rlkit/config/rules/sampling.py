"""Dynamic sampling, partial rollouts, and the functions of the user."""

from dataclasses import fields

from rlkit.config.fields import all_fields
from rlkit.config.hooks import HOOKS, Hook, check_source, has_path_form
from rlkit.config.schema import RunConfig

NONZERO_STD_FILTERS = HOOKS["dynamic_sampling_filter_path"].built_in
_CUTTING_OFF = "--over-sampling-batch-size above --rollout-batch-size, or --dynamic-sampling-filter-path"


def over_sampling_fills_the_batch(cfg: RunConfig) -> str | None:
    size, batch = cfg.rollout.over_sampling_batch_size, cfg.rollout.rollout_batch_size
    if size is None or size >= batch:
        return None
    return (
        f"over_sampling_batch_size = {size} is less than rollout_batch_size = {batch}, which it has to fill;"
        f" pass --over-sampling-batch-size {batch} or more"
    )


def tried_groups_fill_the_batch(cfg: RunConfig) -> str | None:
    bound, first = cfg.rollout.dynamic_sampling_max_groups, cfg.over_sampling_batch_size
    if bound is None or bound >= first:
        return None
    name = "over_sampling_batch_size" if cfg.rollout.over_sampling_batch_size is not None else "rollout_batch_size"
    return (
        f"dynamic_sampling_max_groups = {bound} ends a step before {name} = {first} groups are started;"
        f" pass --dynamic-sampling-max-groups {first} or more"
    )


def rewards_of_a_group_can_differ(cfg: RunConfig) -> str | None:
    path, size = cfg.rollout.dynamic_sampling_filter_path, cfg.rollout.n_samples_per_prompt
    if path is None or short_name(path) not in NONZERO_STD_FILTERS or size >= 2:
        return None
    return (
        f"dynamic_sampling_filter_path = {path} keeps groups whose rewards differ, and n_samples_per_prompt = {size}"
        " leaves nothing to differ from; pass --n-samples-per-prompt 2 or more, or drop --dynamic-sampling-filter-path"
    )


def continuing_needs_groups_that_are_cut_off(cfg: RunConfig) -> str | None:
    rollout = cfg.rollout
    if cfg.cuts_groups_off or rollout.rollout_function_path is not None:
        return None
    for name, value in (
        ("partial_rollout", rollout.partial_rollout),
        ("buffer_filter_path", rollout.buffer_filter_path),
    ):
        if value:
            return (
                f"{name} = {value} has no effect: no group is ever cut off, since every prompt of a step is finished;"
                f" pass {_CUTTING_OFF}"
            )
    return None


def partial_options_need_partial_rollouts(cfg: RunConfig) -> str | None:
    rollout = cfg.rollout
    if rollout.partial_rollout:
        return None
    for name, value in (
        ("mask_offpolicy_in_partial_rollout", rollout.mask_offpolicy_in_partial_rollout),
        ("partial_rollout_max_continuations", rollout.partial_rollout_max_continuations),
    ):
        if value:
            return f"{name} = {value} has no effect without --partial-rollout; pass that too, or drop {_flag(name)}"
    return None


def choosing_groups_needs_engines(cfg: RunConfig) -> str | None:
    if not cfg.is_supervised:
        return None
    for name in (
        "over_sampling_batch_size",
        "dynamic_sampling_filter_path",
        "partial_rollout",
        "custom_generate_function_path",
        "rollout_function_path",
        "rollout_sample_filter_path",
        "rollout_all_samples_process_path",
    ):
        value = getattr(cfg.rollout, name)
        if value:
            return f"{name} = {value} needs generated groups, and loss_type = sft_loss has none; drop {_flag(name)}"
    return None


def one_thing_chooses_the_groups(cfg: RunConfig) -> str | None:
    path = cfg.rollout.rollout_function_path
    if path is None:
        return None
    for name in (
        "dynamic_sampling_filter_path",
        "over_sampling_batch_size",
        "partial_rollout_max_continuations",
        "rollout_all_samples_process_path",
    ):
        value = getattr(cfg.rollout, name)
        if value is not None:
            return f"{name} = {value} is not asked: rollout_function_path = {path} makes the batch; drop {_flag(name)}"
    return None


def functions_are_named_by_path(cfg: RunConfig) -> str | None:
    for hook, path in named_functions(cfg):
        if not has_path_form(hook, path):
            short = f" or one of {', '.join(hook.built_in)}" if hook.built_in else ""
            return (
                f"{hook.field} = {path} is neither package.module.function nor file.py:function;"
                f" write {hook.flag} in one of these forms{short}"
            )
    return None


def functions_can_be_called(cfg: RunConfig) -> list[str]:
    """A path rule: files of hooks are there, hold the function, and it takes the arguments of its call."""
    return [problem for hook, path in named_functions(cfg) if (problem := check_source(hook, path)) is not None]


def named_functions(cfg: RunConfig) -> list[tuple[Hook, str]]:
    """Every hook that the configuration names, with its path; short names of slime's filters are taken for rlkit's."""
    found: list[tuple[Hook, str]] = []
    for section in (cfg.rollout, cfg.reward, cfg.evaluation, cfg.agent):
        for item in fields(section):
            hook = HOOKS.get(item.name)
            if hook is not None and (path := getattr(section, item.name)):
                found.append((hook, short_name(path)))
    return found


def short_name(path: str) -> str:
    """`slime.rollout.filter_hub.dynamic_sampling_filters.NAME` -> `NAME`: scripts written for slime name its filters by
    their place in it.
    """
    name = path.rpartition(".")[2]
    is_slimes = path.startswith("slime.rollout.") and any(name in hook.built_in for hook in HOOKS.values())
    return name if is_slimes else path


def _flag(name: str) -> str:
    return all_fields()[name].flag


RULES = (
    over_sampling_fills_the_batch,
    tried_groups_fill_the_batch,
    rewards_of_a_group_can_differ,
    continuing_needs_groups_that_are_cut_off,
    partial_options_need_partial_rollouts,
    choosing_groups_needs_engines,
    one_thing_chooses_the_groups,
    functions_are_named_by_path,
)
