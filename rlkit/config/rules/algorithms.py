"""Advantages, losses and their corrections: what does not go together."""

from rlkit.config.fields import all_fields
from rlkit.config.schema import RunConfig


def reinforce_is_whitened(cfg: RunConfig) -> str | None:
    estimator = cfg.algo.advantage_estimator
    if not estimator.startswith("reinforce") or cfg.algo.normalize_advantages or cfg.is_supervised:
        return None
    return (
        f"advantage_estimator = {estimator} with normalize_advantages = False has no scale of its own;"
        " pass --normalize-advantages"
    )


def gamma_discounts_rewards(cfg: RunConfig) -> str | None:
    estimator, gamma = cfg.algo.advantage_estimator, cfg.algo.gamma
    if gamma == 1 or estimator in ("reinforce_plus_plus", "ppo"):
        return None
    return (
        f"gamma = {gamma} discounts the returns of reinforce_plus_plus and ppo, but advantage_estimator = {estimator}"
        " gives all tokens of a sample the same; drop --gamma"
    )


def kl_is_in_one_place(cfg: RunConfig) -> str | None:
    as_reward, as_loss = cfg.algo.kl_coef, cfg.algo.kl_loss_coef
    if as_reward == 0 or as_loss == 0:
        return None
    return (
        f"kl_coef = {as_reward} and kl_loss_coef = {as_loss} would punish the same KL twice;"
        " keep --kl-coef (as reward) or --kl-loss-coef (as loss)"
    )


def unbiased_kl_needs_the_kl_loss(cfg: RunConfig) -> str | None:
    if not cfg.algo.use_unbiased_kl or cfg.algo.use_kl_loss:
        return None
    return (
        "use_unbiased_kl = True corrects the gradient of the KL loss, but use_kl_loss = False; pass --use-kl-loss,"
        " or drop --use-unbiased-kl"
    )


def one_denominator_is_chosen(cfg: RunConfig) -> str | None:
    constant = cfg.algo.loss_constant_length
    if constant is None or not cfg.algo.calculate_per_token_loss:
        return None
    return (
        f"loss_constant_length = {constant} divides each sample by a constant, calculate_per_token_loss = True divides"
        " by all tokens; drop --loss-constant-length or --calculate-per-token-loss"
    )


def sequence_ratios_weigh_samples_alike(cfg: RunConfig) -> str | None:
    if cfg.algo.advantage_estimator != "gspo" or cfg.is_supervised:
        return None
    used = {
        "calculate_per_token_loss": cfg.algo.calculate_per_token_loss,
        "loss_constant_length": cfg.algo.loss_constant_length is not None,
    }
    for name, is_used in used.items():
        if is_used:
            return (
                f"advantage_estimator = gspo has one ratio and one loss for a sample, but {name} would count it once"
                f" for each token; drop {all_fields()[name].flag}"
            )
    return None


def cispo_has_no_dual_clip(cfg: RunConfig) -> str | None:
    bound = cfg.algo.eps_clip_c
    if cfg.algo.advantage_estimator != "cispo" or bound is None or cfg.is_supervised:
        return None
    return (
        f"eps_clip_c = {bound} bounds a loss that grows with the ratio, but advantage_estimator = cispo holds the ratio"
        " clipped and fixed; drop --eps-clip-c"
    )


def overlong_buffer_fits(cfg: RunConfig) -> str | None:
    buffer, longest = cfg.algo.overlong_buffer_len, cfg.rollout.rollout_max_response_len
    if buffer is None or buffer <= longest:
        return None
    return (
        f"overlong_buffer_len = {buffer} is longer than rollout_max_response_len = {longest};"
        " lower --overlong-buffer-len"
    )


def weights_need_two_log_probs(cfg: RunConfig) -> str | None:
    """Trainer and engine have to differ for a ratio between them."""
    used = [name for name, is_used in (("use_tis", cfg.mismatch.use_tis), ("use_rs", cfg.mismatch.use_rs)) if is_used]
    if not used or not cfg.algo.use_rollout_logprobs:
        return None
    flags = " and ".join(all_fields()[name].flag for name in used)
    return (
        f"{' and '.join(used)} = True compares trainer and engine, but use_rollout_logprobs = True takes the engine's"
        f" log-probs for both; drop --use-rollout-logprobs or {flags}"
    )


def bands_hold_one(cfg: RunConfig) -> str | None:
    """A ratio of 1, trainer and engine in agreement, must pass."""
    mismatch = cfg.mismatch
    bands = (
        (mismatch.use_tis, "tis_clip_low", mismatch.tis_clip_low, "tis_clip", mismatch.tis_clip),
        (mismatch.use_rs, "rs_lower_bound", mismatch.rs_lower_bound, "rs_upper_bound", mismatch.rs_upper_bound),
    )
    for is_used, low_name, low, high_name, high in bands:
        if is_used and not (low <= 1.0 <= high and low < high):
            flags = f"{all_fields()[low_name].flag} below 1 and {all_fields()[high_name].flag} above it"
            return f"{low_name} = {low} and {high_name} = {high} must have 1 between them; pass {flags}"
    return None


def truncation_is_from_above(cfg: RunConfig) -> str | None:
    mismatch = cfg.mismatch
    if not mismatch.use_tis or mismatch.tis_mode != "truncate" or mismatch.tis_clip_low == 0:
        return None
    return (
        f"tis_clip_low = {mismatch.tis_clip_low} has no effect with tis_mode = truncate, which bounds from above only;"
        " pass --tis-mode clip, or drop --tis-clip-low"
    )


def veto_is_below_the_band(cfg: RunConfig) -> str | None:
    mismatch = cfg.mismatch
    veto = mismatch.rs_veto_threshold
    if not mismatch.use_rs or veto is None or veto < 1:
        return None
    return (
        f"rs_veto_threshold = {veto} rejects samples whose trainer and engine agree (ratio 1);"
        " pass --rs-veto-threshold below 1, e.g. 1e-4"
    )


def corrections_are_switched_on(cfg: RunConfig) -> str | None:
    """Settings of a correction that is off would be read by nobody."""
    switches = {"use_tis": cfg.mismatch.use_tis, "use_rs": cfg.mismatch.use_rs, "use_opd": cfg.distill.use_opd}
    switches["use_opsm"] = cfg.algo.use_opsm
    settings = (
        ("use_tis", "tis_level", cfg.mismatch.tis_level),
        ("use_tis", "tis_mode", cfg.mismatch.tis_mode),
        ("use_tis", "tis_clip", cfg.mismatch.tis_clip),
        ("use_tis", "tis_clip_low", cfg.mismatch.tis_clip_low),
        ("use_tis", "tis_batch_normalize", cfg.mismatch.tis_batch_normalize),
        ("use_rs", "rs_level", cfg.mismatch.rs_level),
        ("use_rs", "rs_upper_bound", cfg.mismatch.rs_upper_bound),
        ("use_rs", "rs_lower_bound", cfg.mismatch.rs_lower_bound),
        ("use_rs", "rs_veto_threshold", cfg.mismatch.rs_veto_threshold),
        ("use_opd", "opd_kl_coef", cfg.distill.opd_kl_coef),
        ("use_opd", "opd_teacher_load", cfg.distill.opd_teacher_load),
        ("use_opsm", "opsm_delta", cfg.algo.opsm_delta),
    )
    for switch, name, value in settings:
        if not switches[switch] and value != all_fields()[name].default:
            return (
                f"{name} = {value} has no effect because {switch} = False; pass {all_fields()[switch].flag},"
                f" or drop {all_fields()[name].flag}"
            )
    if cfg.algo.overlong_buffer_len is None and cfg.algo.overlong_penalty_factor != 1:
        return (
            f"overlong_penalty_factor = {cfg.algo.overlong_penalty_factor} has no effect because overlong_buffer_len is"
            " unset; pass --overlong-buffer-len"
        )
    return None


def teacher_is_named(cfg: RunConfig) -> str | None:
    if not cfg.distill.use_opd or cfg.distill.opd_teacher_load is not None:
        return None
    return "use_opd = True, but opd_teacher_load is unset; pass --opd-teacher-load with the teacher's checkpoint folder"


RULES = (
    reinforce_is_whitened,
    gamma_discounts_rewards,
    kl_is_in_one_place,
    unbiased_kl_needs_the_kl_loss,
    one_denominator_is_chosen,
    sequence_ratios_weigh_samples_alike,
    cispo_has_no_dual_clip,
    overlong_buffer_fits,
    weights_need_two_log_probs,
    bands_hold_one,
    truncation_is_from_above,
    veto_is_below_the_band,
    corrections_are_switched_on,
    teacher_is_named,
)
