"""What every run has to say, depending on its mode."""

from rlkit.config.schema import RunConfig


def only_evaluates(cfg: RunConfig) -> bool:
    """`--num-rollout 0`: one evaluation, no step."""
    return cfg.rollout.num_rollout == 0


def trains(cfg: RunConfig) -> bool:
    """Whether optimizer steps are made."""
    return cfg.starts_trainer and not only_evaluates(cfg)


def reads_prompts(cfg: RunConfig) -> bool:
    """Whether rollouts (or supervised rows) come from the prompt file."""
    replays = cfg.debug.load_debug_rollout_data is not None or (cfg.debug.debug_train_only and not cfg.is_supervised)
    return not only_evaluates(cfg) and not replays


def generates(cfg: RunConfig) -> bool:
    """Whether training responses come from engines."""
    return cfg.starts_engines and not only_evaluates(cfg)


def evaluates(cfg: RunConfig) -> bool:
    """Whether held-out evaluation runs."""
    return cfg.starts_engines and cfg.evaluation.eval_interval is not None


def prompts_per_rollout(cfg: RunConfig) -> str | None:
    """About `rollout_batch_size`."""
    size = cfg.rollout.rollout_batch_size
    if size >= 1 or (only_evaluates(cfg) and size == 0):
        return None
    return f"rollout_batch_size = {size}, but a rollout needs prompts; pass --rollout-batch-size with at least 1"


def group_is_big_enough(cfg: RunConfig) -> str | None:
    """About `n_samples_per_prompt`."""
    size = cfg.rollout.n_samples_per_prompt
    if cfg.is_supervised or not trains(cfg):
        return None if size >= 1 else f"n_samples_per_prompt = {size} must be at least 1; set --n-samples-per-prompt"
    compares = cfg.algo.advantage_estimator not in ("reinforce_plus_plus", "ppo") and not cfg.distill.use_opd
    if size >= 2 or (size == 1 and not compares):
        return None
    if not compares:
        return f"n_samples_per_prompt = {size} must be at least 1; set --n-samples-per-prompt"
    return (
        f"n_samples_per_prompt = {size}, but advantage_estimator = {cfg.algo.advantage_estimator} compares the"
        " responses to one prompt with each other and needs at least 2; pass e.g. --n-samples-per-prompt 8"
    )


def model_is_named(cfg: RunConfig) -> str | None:
    if cfg.model.hf_checkpoint:
        return None
    return "hf_checkpoint is missing; pass --hf-checkpoint with the folder of a Hugging Face checkpoint"


def prompts_are_named(cfg: RunConfig) -> str | None:
    if cfg.data.prompt_data or not reads_prompts(cfg):
        return None
    return "prompt_data is missing; pass --prompt-data with a JSONL file (or --num-rollout 0 to evaluate only)"


def run_has_a_length(cfg: RunConfig) -> str | None:
    if cfg.rollout.num_rollout is not None or cfg.rollout.num_epoch is not None:
        return None
    return (
        "num_rollout and num_epoch are both unset; pass --num-rollout (steps) or --num-epoch (passes over the prompts)"
    )


def epochs_need_a_prompt_file(cfg: RunConfig) -> str | None:
    by_epochs = cfg.rollout.num_rollout is None and cfg.rollout.num_epoch is not None
    if not by_epochs or cfg.data.prompt_data or reads_prompts(cfg):  # the last case is `prompts_are_named`
        return None
    return (
        f"num_epoch = {cfg.rollout.num_epoch} cannot be turned into steps because prompt_data is unset;"
        " pass --prompt-data, or --num-rollout instead"
    )


def first_step_is_before_the_end(cfg: RunConfig) -> str | None:
    first, end = cfg.rollout.start_rollout_id, cfg.rollout.num_rollout
    if first is None or end is None or first < end or end == 0:
        return None
    return f"nothing to do: start_rollout_id = {first}, num_rollout = {end}; pass --num-rollout {first + 1} or more"


def evaluation_only_evaluates_something(cfg: RunConfig) -> str | None:
    if not only_evaluates(cfg):
        return None
    has_data = cfg.evaluation.eval_prompt_data or cfg.evaluation.eval_config is not None
    if cfg.evaluation.eval_interval is None or not has_data:
        return "num_rollout = 0 evaluates only, so it needs --eval-interval 1 and --eval-prompt-data NAME PATH"
    if cfg.evaluation.skip_eval_before_train:
        return "num_rollout = 0 and skip_eval_before_train leave nothing to do; drop --skip-eval-before-train"
    if not cfg.starts_engines:
        return (
            "num_rollout = 0 evaluates only, but no engine starts with sft_loss or a replayed rollout;"
            " drop --loss-type, --load-debug-rollout-data and --debug-train-only"
        )
    return None


RULES = (
    model_is_named,
    prompts_are_named,
    run_has_a_length,
    epochs_need_a_prompt_file,
    first_step_is_before_the_end,
    evaluation_only_evaluates_something,
)
