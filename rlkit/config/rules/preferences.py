"""DPO: pairs of responses that stand in the data."""

from rlkit.config.fields import all_fields
from rlkit.config.schema import RunConfig


def preferences_come_in_pairs(cfg: RunConfig) -> str | None:
    samples = cfg.rollout.n_samples_per_prompt
    if not cfg.is_dpo or samples == 2:
        return None
    return (
        f"n_samples_per_prompt = {samples}, but loss_type = dpo_loss has two responses to a prompt, the chosen and the"
        " rejected one; pass --n-samples-per-prompt 2"
    )


def pairs_stay_together(cfg: RunConfig) -> str | None:
    size = cfg.train.global_batch_size
    if not cfg.is_dpo or size is None or size % 2 == 0:
        return None
    return (
        f"global_batch_size = {size} counts responses and would tear a pair apart with loss_type = dpo_loss;"
        " pass an even --global-batch-size"
    )


def pairs_are_weighed_alike(cfg: RunConfig) -> str | None:
    used = {
        "calculate_per_token_loss": cfg.algo.calculate_per_token_loss,
        "loss_constant_length": cfg.algo.loss_constant_length is not None,
    }
    for name, is_used in used.items():
        if is_used and cfg.is_dpo:
            return (
                f"loss_type = dpo_loss has one loss for a pair, which {name} would weigh by its tokens;"
                f" drop {all_fields()[name].flag}"
            )
    return None


def pairs_have_no_label(cfg: RunConfig) -> str | None:
    key = cfg.data.label_key
    if not cfg.is_dpo or key is None:
        return None
    return (
        f"label_key = {key}, but loss_type = dpo_loss reads the columns {cfg.dpo.chosen_key!r} and"
        f" {cfg.dpo.rejected_key!r} (--chosen-key, --rejected-key); drop --label-key"
    )


def pair_columns_differ(cfg: RunConfig) -> str | None:
    chosen, rejected, prompt = cfg.dpo.chosen_key, cfg.dpo.rejected_key, cfg.data.input_key
    if not cfg.is_dpo or len({chosen, rejected, prompt}) == 3:
        return None
    return (
        f"input_key = {prompt}, chosen_key = {chosen} and rejected_key = {rejected} must be three columns;"
        " correct --input-key, --chosen-key or --rejected-key"
    )


def smoothing_is_of_the_sigmoid_loss(cfg: RunConfig) -> str | None:
    smoothing = cfg.dpo.dpo_label_smoothing
    if smoothing == 0 or not cfg.is_dpo or cfg.dpo.dpo_loss_type == "sigmoid":
        return None
    return (
        f"dpo_label_smoothing = {smoothing} has no place in dpo_loss_type = {cfg.dpo.dpo_loss_type};"
        " pass --dpo-loss-type sigmoid, or drop --dpo-label-smoothing"
    )


def pair_settings_have_pairs(cfg: RunConfig) -> str | None:
    if cfg.is_dpo:
        return None
    dpo = cfg.dpo
    settings = {
        "dpo_beta": dpo.dpo_beta,
        "dpo_loss_type": dpo.dpo_loss_type,
        "dpo_label_smoothing": dpo.dpo_label_smoothing,
        "chosen_key": dpo.chosen_key,
        "rejected_key": dpo.rejected_key,
    }
    for name, value in settings.items():
        field = all_fields()[name]
        if value != field.default:
            return (
                f"{name} = {value} has no effect with loss_type = {cfg.algo.loss_type};"
                f" pass --loss-type dpo_loss, or drop {field.flag}"
            )
    return None


RULES = (
    preferences_come_in_pairs,
    pairs_stay_together,
    pairs_are_weighed_alike,
    pairs_have_no_label,
    pair_columns_differ,
    smoothing_is_of_the_sigmoid_loss,
    pair_settings_have_pairs,
)
