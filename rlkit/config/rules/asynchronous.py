"""Generating while training: what does not go together."""

from rlkit.config.fields import all_fields
from rlkit.config.rules.required import only_evaluates
from rlkit.config.schema import RunConfig


def asynchronous_sides_have_their_own_gpus(cfg: RunConfig) -> str | None:
    mode = cfg.async_training.async_mode
    if mode is None or not cfg.cluster.colocate:
        return None
    return (
        f"async_mode = {mode} generates while it trains, but colocate = True makes engines and trainer take turns on"
        " the same GPUs; drop --colocate and pass --rollout-num-gpus N, or run train.py"
    )


def asynchronous_runs_generate_and_train(cfg: RunConfig) -> str | None:
    mode = cfg.async_training.async_mode
    if mode is None or (cfg.starts_engines and cfg.starts_trainer):
        return None
    if cfg.is_supervised:
        reason = f"loss_type = {cfg.algo.loss_type} generates nothing"
    elif cfg.debug.debug_rollout_only:
        reason = "debug_rollout_only = True trains nothing"
    elif cfg.debug.debug_train_only:
        reason = "debug_train_only = True generates nothing"
    else:
        reason = f"load_debug_rollout_data = {cfg.debug.load_debug_rollout_data} generates nothing"
    return f"async_mode = {mode} has nothing to do at the same time: {reason}; drop --async-mode and run train.py"


def staleness_flags_have_their_mode(cfg: RunConfig) -> str | None:
    options = cfg.async_training
    if options.is_full:
        return None
    defaults = all_fields()
    for name, value in (
        ("max_staleness", options.max_staleness),
        ("stale_groups", options.stale_groups),
        ("staleness_decay", options.staleness_decay),
    ):
        if value != defaults[name].default:
            return (
                f"{name} = {value} has no effect with async_mode = {options.async_mode}: only a run that never stops"
                f" generating has to be bounded; give train_async.py --async-mode full, or drop {defaults[name].flag}"
            )
    return None


def decay_needs_weights(cfg: RunConfig) -> str | None:
    options = cfg.async_training
    if options.stale_groups == "downweight" or options.staleness_decay == all_fields()["staleness_decay"].default:
        return None
    return (
        f"staleness_decay = {options.staleness_decay} has no effect with stale_groups = {options.stale_groups};"
        " pass --stale-groups downweight, or drop --staleness-decay"
    )


def weights_survive_whitening(cfg: RunConfig) -> str | None:
    if cfg.async_training.stale_groups != "downweight":
        return None
    if cfg.algo.advantage_estimator == "ppo":
        return (
            "stale_groups = downweight scales the advantages of groups, but advantage_estimator = ppo takes them from"
            " a critic; pass --stale-groups drop or wait"
        )
    if not cfg.algo.normalize_advantages:
        return None
    return (
        "stale_groups = downweight scales advantages, which normalize_advantages = True would then whiten away;"
        " pass --stale-groups drop or wait, or drop --normalize-advantages"
    )


def updates_come_before_groups_are_stale(cfg: RunConfig) -> str | None:
    limit, interval = cfg.async_training.staleness_limit, cfg.sync.update_weights_interval
    if not cfg.async_training.is_full or limit >= interval - 1:
        return None
    return (
        f"max_staleness = {limit} is less than update_weights_interval - 1 = {interval - 1}: before an update every"
        f" group would be too stale, and none could be started; pass --max-staleness {interval} or more"
    )


def generation_without_steps_has_no_step_functions(cfg: RunConfig) -> str | None:
    """A pool that never stops has no beginning and end of a step's generation."""
    if not cfg.async_training.is_full or only_evaluates(cfg):
        return None
    for name, why in (
        ("rollout_function_path", "makes the batch of one step, and there is no generation of one step"),
        ("over_sampling_batch_size", "is set by --max-staleness: that many batches are in flight"),
        ("partial_rollout", "is always so: no group is cut off"),
        ("buffer_filter_path", "has nothing to choose from: no group is cut off"),
    ):
        value = getattr(cfg.rollout, name)
        if value:
            return f"{name} = {value} with async_mode = full {why}; drop {all_fields()[name].flag}"
    return None


RULES = (
    asynchronous_sides_have_their_own_gpus,
    asynchronous_runs_generate_and_train,
    staleness_flags_have_their_mode,
    decay_needs_weights,
    weights_survive_whitening,
    updates_come_before_groups_are_stale,
    generation_without_steps_has_no_step_functions,
)
