"""Loss, optimizer, checkpoints and the half runs of the debug flags."""

from rlkit.config.fields import all_fields
from rlkit.config.schema import RunConfig

_STEP = "{rollout_id}"
"""The one placeholder of path templates."""


def kl_coefficient_needs_the_kl_loss(cfg: RunConfig) -> str | None:
    coefficient = cfg.algo.kl_loss_coef
    if coefficient == 0 or cfg.algo.use_kl_loss:
        return None
    return f"kl_loss_coef = {coefficient} has no effect because use_kl_loss = False; pass --use-kl-loss"


def sft_has_responses(cfg: RunConfig) -> str | None:
    if not cfg.is_sft or cfg.data.label_key is not None or cfg.debug.load_debug_rollout_data is not None:
        return None
    if cfg.data.apply_chat_template:
        return None  # the conversations of --input-key hold them
    return (
        "loss_type = sft_loss trains on given responses, but label_key is unset; pass --label-key COLUMN,"
        " or --apply-chat-template where --input-key holds whole conversations"
    )


def sft_takes_each_row_once(cfg: RunConfig) -> str | None:
    samples = cfg.rollout.n_samples_per_prompt
    if not cfg.is_sft or samples <= 1:
        return None
    return (
        f"n_samples_per_prompt = {samples} would repeat each row within its batch with loss_type = sft_loss;"
        " pass --n-samples-per-prompt 1"
    )


def sft_has_no_policy_terms(cfg: RunConfig) -> str | None:
    algo = cfg.algo
    terms = {
        "use_kl_loss": algo.use_kl_loss,
        "entropy_coef": algo.entropy_coef != 0,
        "use_rollout_logprobs": algo.use_rollout_logprobs,
        "eps_clip_c": algo.eps_clip_c is not None,
        "kl_coef": algo.kl_coef != 0,
        "normalize_advantages": algo.normalize_advantages,
        "overlong_buffer_len": algo.overlong_buffer_len is not None,
        "use_opsm": algo.use_opsm,
        "use_tis": cfg.mismatch.use_tis,
        "use_rs": cfg.mismatch.use_rs,
        "use_opd": cfg.distill.use_opd,
    }
    used = [name for name, is_used in terms.items() if is_used]
    if not cfg.is_supervised or not used:
        return None
    return f"loss_type = {cfg.algo.loss_type} has no place for {', '.join(used)}; drop {', '.join(_flags(used))}"


def resumed_checkpoint_has_a_folder(cfg: RunConfig) -> str | None:
    checkpoint = cfg.checkpoint
    if checkpoint.load is not None or checkpoint.save is not None or cfg.logging.output_dir is not None:
        return None
    wanted = {"ckpt_step": checkpoint.ckpt_step is not None, "no_load_optim": checkpoint.no_load_optim}
    used = [name for name, is_used in wanted.items() if is_used]
    if not used:
        return None
    return f"{', '.join(used)}: there is no checkpoint to continue from because load is unset; pass --load FOLDER"


def finetuning_has_weights(cfg: RunConfig) -> str | None:
    checkpoint = cfg.checkpoint
    if not checkpoint.finetune or (checkpoint.load is not None and checkpoint.load != checkpoint.save):
        return None
    found = "unset" if checkpoint.load is None else f"{checkpoint.load}, the folder of save"
    return f"finetune = True takes the weights of another run, but load is {found}; pass --load FOLDER of that run"


def paths_have_only_the_step_placeholder(cfg: RunConfig) -> str | None:
    for name, path in _templates(cfg).items():
        rest = path.replace(_STEP, "")
        if "{" in rest or "}" in rest:
            return f"{name} = {path}: only {_STEP} is filled in; correct {all_fields()[name].flag}"
    return None


def dumps_do_not_overwrite_each_other(cfg: RunConfig) -> str | None:
    path = cfg.debug.save_debug_rollout_data
    if path is None or _STEP in path or cfg.rollout.num_rollout == 1:
        return None
    return (
        f"save_debug_rollout_data = {path} has no {_STEP}, so every step would overwrite it;"
        f" pass e.g. --save-debug-rollout-data 'rollout_{_STEP}.jsonl'"
    )


def dump_and_replay_differ(cfg: RunConfig) -> str | None:
    written, read = cfg.debug.save_debug_rollout_data, cfg.debug.load_debug_rollout_data
    if written is None or written != read:
        return None
    return f"save_debug_rollout_data and load_debug_rollout_data are both {written}; drop --save-debug-rollout-data"


def debug_modes_exclude_each_other(cfg: RunConfig) -> str | None:
    if not (cfg.debug.debug_rollout_only and cfg.debug.debug_train_only):
        return None
    return "debug_rollout_only and debug_train_only are both True; pass --debug-rollout-only or --debug-train-only"


def training_only_has_a_rollout(cfg: RunConfig) -> str | None:
    if not cfg.debug.debug_train_only or cfg.debug.load_debug_rollout_data is not None or cfg.is_supervised:
        return None
    return (
        "debug_train_only = True, but load_debug_rollout_data is unset, so there is nothing to train on;"
        " pass --load-debug-rollout-data PATH"
    )


def something_runs(cfg: RunConfig) -> str | None:
    if not cfg.debug.debug_rollout_only or cfg.starts_engines or cfg.debug.debug_train_only:
        return None
    replay = cfg.debug.load_debug_rollout_data
    reason = f"load_debug_rollout_data = {replay}" if replay is not None else f"loss_type = {cfg.algo.loss_type}"
    return f"debug_rollout_only = True trains nothing and {reason} generates nothing; drop --debug-rollout-only"


def _templates(cfg: RunConfig) -> dict[str, str]:
    paths = {
        "save_hf": cfg.checkpoint.save_hf,
        "critic_save": cfg.critic.critic_save,
        "save_debug_rollout_data": cfg.debug.save_debug_rollout_data,
        "load_debug_rollout_data": cfg.debug.load_debug_rollout_data,
    }
    return {name: path for name, path in paths.items() if path is not None}


def _flags(names: list[str]) -> list[str]:
    return [all_fields()[name].flag for name in names]


RULES = (
    kl_coefficient_needs_the_kl_loss,
    sft_has_responses,
    sft_takes_each_row_once,
    sft_has_no_policy_terms,
    resumed_checkpoint_has_a_folder,
    finetuning_has_weights,
    paths_have_only_the_step_placeholder,
    dumps_do_not_overwrite_each_other,
    dump_and_replay_differ,
    debug_modes_exclude_each_other,
    training_only_has_a_rollout,
    something_runs,
)
