"""Learning-rate schedule, and which parameters are trained."""

import re

from rlkit.config.fields import all_fields
from rlkit.config.rules.required import trains
from rlkit.config.schema import RunConfig


def learning_rate_decays_downwards(cfg: RunConfig) -> str | None:
    peak, floor, style = cfg.optimizer.lr, cfg.optimizer.min_lr, cfg.optimizer.lr_decay_style
    if style == "constant" or floor <= peak:
        return None
    return f"min_lr = {floor} is above lr = {peak}; lower --min-lr or raise --lr"


def warmup_rises(cfg: RunConfig) -> str | None:
    peak, start = cfg.optimizer.lr, cfg.optimizer.lr_warmup_init
    if start <= peak:
        return None
    return f"lr_warmup_init = {start} is above lr = {peak}; lower --lr-warmup-init or raise --lr"


def warmup_is_given_once(cfg: RunConfig) -> str | None:
    steps, fraction = cfg.optimizer.lr_warmup_iters, cfg.optimizer.lr_warmup_fraction
    if steps == 0 or fraction is None:
        return None
    return (
        f"lr_warmup_iters = {steps} and lr_warmup_fraction = {fraction} both say how long the warm-up is;"
        " drop --lr-warmup-iters or --lr-warmup-fraction"
    )


def warmup_init_has_a_warmup(cfg: RunConfig) -> str | None:
    start = cfg.optimizer.lr_warmup_init
    if start == 0 or cfg.optimizer.lr_warmup_iters > 0 or cfg.optimizer.lr_warmup_fraction is not None:
        return None
    return f"lr_warmup_init = {start} has no effect without a warm-up; pass --lr-warmup-iters or drop --lr-warmup-init"


def warmup_ends_before_the_decay(cfg: RunConfig) -> str | None:
    style, end, warmup = cfg.optimizer.lr_decay_style, cfg.schedule_end, cfg.warmup_steps
    if style == "constant" or not trains(cfg) or end is None or warmup < end:
        return None
    origin = "lr_decay_iters" if cfg.optimizer.lr_decay_iters is not None else "optimizer steps of the run"
    return (
        f"the warm-up of {warmup} steps leaves none for the {style} decay, which ends at {origin} = {end};"
        " lower --lr-warmup-iters or raise --lr-decay-iters"
    )


def wsd_decay_has_a_length(cfg: RunConfig) -> str | None:
    """WSD needs to know when its decay begins; the other styles have no use for it."""
    optimizer = cfg.optimizer
    is_wsd, steps = optimizer.lr_decay_style == "WSD", optimizer.lr_wsd_decay_iters
    if not is_wsd:
        for name in ("lr_wsd_decay_iters", "lr_wsd_decay_style"):
            value = {"lr_wsd_decay_iters": steps, "lr_wsd_decay_style": optimizer.lr_wsd_decay_style}[name]
            if value != all_fields()[name].default:
                flag = all_fields()[name].flag
                return (
                    f"{name} = {value} has no effect with lr_decay_style = {optimizer.lr_decay_style};"
                    f" pass --lr-decay-style WSD or drop {flag}"
                )
        return None
    if steps is None:
        return "lr_decay_style = WSD, but lr_wsd_decay_iters is unset; pass --lr-wsd-decay-iters"
    end, warmup = cfg.schedule_end, cfg.warmup_steps
    if end is None or not trains(cfg) or warmup + steps <= end:
        return None
    return (
        f"lr_wsd_decay_iters = {steps} and a warm-up of {warmup} steps do not fit before the end of the decay at"
        f" {end}; lower --lr-wsd-decay-iters or raise --lr-decay-iters"
    )


def trained_parameters_are_named_once(cfg: RunConfig) -> str | None:
    only, frozen = cfg.optimizer.only_train_params_name_list, cfg.optimizer.freeze_params_name_list
    if not only or not frozen:
        return None
    return (
        f"only_train_params_name_list = {' '.join(only)} and freeze_params_name_list = {' '.join(frozen)} exclude"
        " each other; drop --only-train-params-name-list or --freeze-params-name-list"
    )


def parameter_names_are_patterns(cfg: RunConfig) -> str | None:
    for name in ("only_train_params_name_list", "freeze_params_name_list"):
        for pattern in _patterns(cfg, name):
            try:
                re.compile(pattern)
            except re.error as error:
                return f"{name}: {pattern!r} is no regular expression ({error}); correct {all_fields()[name].flag}"
    return None


def _patterns(cfg: RunConfig, name: str) -> tuple[str, ...]:
    optimizer = cfg.optimizer
    if name == "only_train_params_name_list":
        return optimizer.only_train_params_name_list
    return optimizer.freeze_params_name_list


RULES = (
    learning_rate_decays_downwards,
    warmup_rises,
    warmup_is_given_once,
    warmup_init_has_a_warmup,
    warmup_ends_before_the_decay,
    wsd_decay_has_a_length,
    trained_parameters_are_named_once,
    parameter_names_are_patterns,
)
