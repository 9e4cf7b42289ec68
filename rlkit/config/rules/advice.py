"""What works, but probably not as meant: sentences printed before a run, never errors."""

from rlkit.config.rules.required import evaluates, generates, trains
from rlkit.config.schema import LoggingConfig, ReportConfig, RunConfig

_WANDB = ("wandb_mode", "wandb_project", "wandb_group", "wandb_team", "wandb_run_name")
_TENSORBOARD = ("tensorboard_dir", "tb_project_name", "tb_experiment_name")
_MLFLOW = ("mlflow_tracking_uri", "mlflow_experiment", "mlflow_run_name")


def truncated_sampling_biases_the_gradient(cfg: RunConfig) -> str | None:
    top_p, top_k = cfg.rollout.rollout_top_p, cfg.rollout.rollout_top_k
    if not (generates(cfg) and trains(cfg)) or (top_p == 1 and top_k == -1):
        return None
    return (
        f"rollout_top_p = {top_p}, rollout_top_k = {top_k}: samples come from a truncated distribution, while log-probs"
        " on both sides are over the whole vocabulary, so the gradient is biased; 1.0 and -1 are unbiased"
    )


def kl_is_only_reported(cfg: RunConfig) -> str | None:
    if not (cfg.algo.use_kl_loss and trains(cfg)) or cfg.is_supervised or cfg.algo.kl_loss_coef != 0:
        return None
    return "use_kl_loss with kl_loss_coef = 0.0 loads the reference model only to report the KL, not to train on it"


def reference_is_not_loaded(cfg: RunConfig) -> str | None:
    if cfg.model.ref_load is None or cfg.needs_reference:
        return None
    return (
        f"ref_load = {cfg.model.ref_load} is not used: nothing needs a reference model"
        " (--use-kl-loss or --kl-coef would)"
    )


def epochs_are_overruled(cfg: RunConfig) -> str | None:
    steps, epochs = cfg.rollout.num_rollout, cfg.rollout.num_epoch
    if steps is None or epochs is None:
        return None
    return f"num_epoch = {epochs} is not used because num_rollout = {steps} counts the steps"


def schedule_is_constant(cfg: RunConfig) -> str | None:
    optimizer = cfg.optimizer
    if optimizer.lr_decay_style != "constant" or (optimizer.min_lr == 0 and optimizer.lr_decay_iters is None):
        return None
    return (
        f"min_lr = {optimizer.min_lr} and lr_decay_iters = {optimizer.lr_decay_iters} are not used with"
        " lr_decay_style = constant"
    )


def warmup_never_ends(cfg: RunConfig) -> str | None:
    warmup, rollouts = cfg.warmup_steps, cfg.rollout.num_rollout
    if not trains(cfg) or rollouts is None or cfg.optimizer.lr_decay_style != "constant":
        return None
    steps = rollouts * cfg.steps_per_rollout
    if warmup < steps:
        return None
    return (
        f"the warm-up takes {warmup} optimizer steps, but the run makes {steps}: lr = {cfg.optimizer.lr} is not reached"
    )


def nothing_is_learned(cfg: RunConfig) -> str | None:
    if not trains(cfg) or cfg.optimizer.lr != 0:
        return None
    return "lr = 0.0: the weights will not change"


def long_responses_run_alone(cfg: RunConfig) -> str | None:
    longest, cp = cfg.rollout.rollout_max_response_len, cfg.train.context_parallel_size
    budget = cfg.train.max_tokens_per_gpu * cp
    if not trains(cfg) or cfg.is_supervised or longest <= budget:
        return None
    said = f" x context_parallel_size = {cfg.train.max_tokens_per_gpu} x {cp}" if cp > 1 else ""
    return (
        f"rollout_max_response_len = {longest} is more than max_tokens_per_gpu{said} = {budget}: a longer sample is a"
        f" micro-batch by itself and needs the memory of its own length; memory is bounded by {longest} tokens then"
    )


def context_cuts_responses(cfg: RunConfig) -> str | None:
    prompt, response = cfg.data.rollout_max_prompt_len, cfg.rollout.rollout_max_response_len
    context = cfg.rollout.rollout_max_context_len
    if prompt is None or context is None or not generates(cfg) or prompt + response <= context:
        return None
    return (
        f"rollout_max_prompt_len + rollout_max_response_len = {prompt} + {response} = {prompt + response} is more than"
        f" rollout_max_context_len = {context}: long prompts leave less than {response} tokens for the response"
    )


def greedy_samples_are_equal(cfg: RunConfig) -> str | None:
    samples = cfg.evaluation.n_samples_per_eval_prompt
    if not evaluates(cfg) or cfg.evaluation.eval_temperature != 0 or samples == 1:
        return None
    return f"eval_temperature = 0.0 is greedy: n_samples_per_eval_prompt = {samples} gives {samples} equal responses"


def evaluation_is_off(cfg: RunConfig) -> str | None:
    if cfg.evaluation.eval_interval is None or evaluates(cfg) or cfg.is_supervised:
        return None
    return (
        f"eval_interval = {cfg.evaluation.eval_interval} is not used: no engine starts when a saved rollout is replayed"
    )


def supervised_rows_are_not_graded(cfg: RunConfig) -> str | None:
    grader = cfg.reward.rm_type or cfg.reward.custom_rm_path
    if not cfg.is_supervised or grader is None:
        return None
    return f"the grader {grader} is not used: loss_type = sft_loss grades nothing"


def some_shared_gpus_do_not_generate(cfg: RunConfig) -> str | None:
    engines, ranks = cfg.cluster.engine_num_gpus, cfg.cluster.actor_num_gpus
    if not (cfg.cluster.colocate and generates(cfg) and trains(cfg)) or engines >= ranks:
        return None
    return f"colocate with rollout_num_gpus = {engines}: {ranks - engines} of {ranks} GPUs idle during generation"


def only_grpo_divides_by_the_deviation(cfg: RunConfig) -> str | None:
    estimator = cfg.algo.advantage_estimator
    if estimator in ("grpo", "gspo", "cispo") or not cfg.algo.disable_grpo_std_normalization:
        return None
    return f"disable_grpo_std_normalization is not used: advantage_estimator = {estimator} never divides by a deviation"


def half_precision_is_slow_on_a_cpu(cfg: RunConfig) -> str | None:
    if cfg.cluster.device != "cpu" or cfg.model.dtype != "bfloat16":
        return None
    return "dtype = bfloat16 on device = cpu is slower than float32 on most CPUs; --dtype auto takes float32"


def export_overwrites_itself(cfg: RunConfig) -> str | None:
    folder, interval = cfg.checkpoint.save_hf, cfg.checkpoint.save_interval
    if folder is None or interval is None or "{rollout_id}" in folder or not trains(cfg):
        return None
    return f"save_hf = {folder} has no {{rollout_id}}: each save (save_interval = {interval}) replaces the last"


def upper_clip_is_tighter(cfg: RunConfig) -> str | None:
    low, high = cfg.algo.eps_clip, cfg.algo.eps_clip_high
    if high is None or high >= low or cfg.is_supervised:
        return None
    return f"eps_clip_high = {high} is below eps_clip = {low}: raising a probability is clipped sooner than lowering it"


def cispo_is_free_from_below(cfg: RunConfig) -> str | None:
    if cfg.algo.advantage_estimator != "cispo" or cfg.algo.eps_clip == 1 or cfg.is_supervised:
        return None
    return (
        f"advantage_estimator = cispo with eps_clip = {cfg.algo.eps_clip}: the paper bounds ratios from above only;"
        " --eps-clip 1 does"
    )


def sequence_ratios_are_close_to_one(cfg: RunConfig) -> str | None:
    if cfg.algo.advantage_estimator != "gspo" or cfg.algo.eps_clip < 0.05 or cfg.is_supervised:
        return None
    return (
        f"advantage_estimator = gspo with eps_clip = {cfg.algo.eps_clip} clips next to nothing: mean log-ratios of"
        " whole samples are small; the paper has --eps-clip 3e-4 --eps-clip-high 4e-4"
    )


def reward_kl_is_biased(cfg: RunConfig) -> str | None:
    coefficient, kl_type = cfg.algo.kl_coef, cfg.algo.kl_loss_type
    if coefficient == 0 or kl_type == "k1" or cfg.is_supervised:
        return None
    return (
        f"kl_coef = {coefficient} with kl_loss_type = {kl_type}: as a reward only k1 has the gradient of the KL;"
        " --kl-loss-type k1"
    )


def no_logging_account_is_used(cfg: RunConfig) -> str | None:
    """Options of a tracker that is off."""
    log, report = cfg.logging, cfg.report
    trackers: list[tuple[bool, str, LoggingConfig | ReportConfig, tuple[str, ...]]] = [
        (log.use_wandb, "--use-wandb", log, _WANDB),
        (report.use_tensorboard, "--use-tensorboard", report, _TENSORBOARD),
        (report.use_mlflow, "--use-mlflow", report, _MLFLOW),
    ]
    unused: list[str] = []
    for is_used, flag, section, names in trackers:
        defaults = type(section)()
        given = [name for name in names if getattr(section, name) != getattr(defaults, name)]
        if given and not is_used:
            unused.append(f"{', '.join(given)} {'is' if len(given) == 1 else 'are'} not used without {flag}")
    return "; ".join(unused) or None


def asynchronous_samples_are_off_policy(cfg: RunConfig) -> str | None:
    mode = cfg.async_training.async_mode
    if mode is None or cfg.mismatch.use_tis or cfg.mismatch.use_rs or cfg.algo.use_rollout_logprobs:
        return None
    return (
        f"async_mode = {mode} trains on samples of older weights, and the loss does not correct for that: --use-tis"
        " weighs tokens by the ratio, --use-rollout-logprobs clips against the policy that sampled"
    )


ADVICE = (
    truncated_sampling_biases_the_gradient,
    kl_is_only_reported,
    reference_is_not_loaded,
    epochs_are_overruled,
    schedule_is_constant,
    warmup_never_ends,
    nothing_is_learned,
    long_responses_run_alone,
    context_cuts_responses,
    greedy_samples_are_equal,
    evaluation_is_off,
    supervised_rows_are_not_graded,
    some_shared_gpus_do_not_generate,
    only_grpo_divides_by_the_deviation,
    half_precision_is_slow_on_a_cpu,
    export_overwrites_itself,
    upper_clip_is_tighter,
    cispo_is_free_from_below,
    sequence_ratios_are_close_to_one,
    reward_kl_is_biased,
    asynchronous_samples_are_off_policy,
    no_logging_account_is_used,
)
"""Like rules, but what they say is advice."""
