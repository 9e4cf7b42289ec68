"""PPO's critic, and a reference that moves."""

from rlkit.config.fields import all_fields
from rlkit.config.schema import RunConfig


def critic_settings_have_a_critic(cfg: RunConfig) -> str | None:
    if cfg.needs_critic:
        return None
    critic = cfg.critic
    settings = {
        "critic_load": critic.critic_load,
        "critic_save": critic.critic_save,
        "critic_lr": critic.critic_lr,
        "critic_lr_warmup_iters": critic.critic_lr_warmup_iters,
        "num_critic_only_steps": critic.num_critic_only_steps,
        "value_clip": critic.value_clip,
        "lambd": critic.lambd,
    }
    for name, value in settings.items():
        field = all_fields()[name]
        if value != field.default:
            return (
                f"{name} = {value} belongs to PPO's critic, but advantage_estimator ="
                f" {cfg.algo.advantage_estimator} and loss_type = {cfg.algo.loss_type} have none;"
                f" pass --advantage-estimator ppo, or drop {field.flag}"
            )
    return None


def policy_learns_after_the_critic(cfg: RunConfig) -> str | None:
    alone, steps = cfg.critic.num_critic_only_steps, cfg.rollout.num_rollout
    if not cfg.needs_critic or not steps or alone < steps:
        return None
    return (
        f"num_critic_only_steps = {alone} leaves none of num_rollout = {steps} steps for the policy;"
        " lower --num-critic-only-steps or raise --num-rollout"
    )


def critic_warmup_ends_before_the_decay(cfg: RunConfig) -> str | None:
    warmup, style = cfg.critic.critic_lr_warmup_iters, cfg.optimizer.lr_decay_style
    end = cfg.optimizer.lr_decay_iters
    if end is None and cfg.rollout.num_rollout is not None:
        end = cfg.rollout.num_rollout * cfg.steps_per_rollout
    if not cfg.needs_critic or style == "constant" or end is None or warmup < end:
        return None
    return (
        f"critic_lr_warmup_iters = {warmup} leaves no step for the {style} decay, which ends at optimizer step {end};"
        " lower --critic-lr-warmup-iters"
    )


def critic_computes_without_loss_scale(cfg: RunConfig) -> str | None:
    if not cfg.needs_critic or not cfg.precision.fp16:
        return None
    return (
        "fp16 = True scales the loss of the policy, and the critic of advantage_estimator = ppo has none;"
        " drop --fp16 (bfloat16 needs none)"
    )


def critic_lives_with_its_ranks(cfg: RunConfig) -> str | None:
    """The critic comes to the GPU as a whole and goes back to the host."""
    if not cfg.needs_critic or not cfg.fsdp.fsdp_cpu_offload:
        return None
    return (
        "fsdp_cpu_offload = True keeps parameters on the host during the step, which the critic of"
        " advantage_estimator = ppo cannot; drop --fsdp-cpu-offload (the critic leaves the GPU when it rests anyway)"
    )


def moving_modules_are_sharded(cfg: RunConfig) -> str | None:
    """What only the FSDP backend has."""
    if cfg.train.train_backend == "fsdp":
        return None
    wanted = {
        "advantage_estimator = ppo": (cfg.needs_critic, "another --advantage-estimator"),
        f"ref_update_interval = {cfg.model.ref_update_interval}": (
            cfg.model.ref_update_interval is not None,
            "no --ref-update-interval",
        ),
    }
    for what, (is_wanted, remedy) in wanted.items():
        if is_wanted:
            backend = cfg.train.train_backend
            return f"{what} needs train_backend = fsdp, not {backend}; pass --train-backend fsdp or {remedy}"
    return None


def exports_have_their_own_folders(cfg: RunConfig) -> str | None:
    path = cfg.critic.critic_save
    if path is None or path != cfg.checkpoint.save_hf:
        return None
    return f"critic_save and save_hf are both {path}; choose another --critic-save"


def moving_reference_is_used(cfg: RunConfig) -> str | None:
    interval = cfg.model.ref_update_interval
    if interval is None:
        return None
    if not cfg.needs_reference:
        return (
            f"ref_update_interval = {interval}, but this run has no reference model: use_kl_loss = False and"
            " kl_coef = 0; pass --use-kl-loss or --kl-coef, or drop --ref-update-interval"
        )
    if cfg.uses_lora:
        return (
            f"ref_update_interval = {interval} copies the policy into the reference, but with lora_rank ="
            f" {cfg.lora.lora_rank} what moves is its adapters; drop --ref-update-interval or --lora-rank"
        )
    return None


RULES = (
    critic_settings_have_a_critic,
    policy_learns_after_the_critic,
    critic_warmup_ends_before_the_decay,
    critic_computes_without_loss_scale,
    critic_lives_with_its_ranks,
    moving_modules_are_sharded,
    exports_have_their_own_folders,
    moving_reference_is_used,
)
