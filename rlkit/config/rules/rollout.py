"""Prompts, sampling, graders and evaluation."""

import re

from rlkit.config.fields import all_fields
from rlkit.config.reward_names import REWARD_NAMES
from rlkit.config.rules.required import evaluates, generates
from rlkit.config.schema import RunConfig
from rlkit.config.values import nearest

_SLICE = re.compile(r"@\[-?\d*:-?\d*\]$")
_FILE_FUNCTION = re.compile(r".+\.py:[^\W\d]\w*")
_DOTTED_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
_EVAL_NAME = re.compile(r"[\w.+-]+")
_LABEL_FREE_GRADERS = ("random",)


def without_slice(path: str) -> str:
    """`train.jsonl@[100:]` -> `train.jsonl`."""
    return _SLICE.sub("", path)


def eval_pairs(cfg: RunConfig) -> list[tuple[str, str]]:
    """(name, path) of every evaluation set."""
    words = cfg.evaluation.eval_prompt_data
    return list(zip(words[::2], words[1::2], strict=False))


def template_arguments_need_the_template(cfg: RunConfig) -> str | None:
    arguments = cfg.data.apply_chat_template_kwargs
    if not arguments or cfg.data.apply_chat_template:
        return None
    return f"apply_chat_template_kwargs = {arguments} has no effect without --apply-chat-template; pass that too"


def columns_differ(cfg: RunConfig) -> str | None:
    column = cfg.data.input_key
    if column != cfg.data.label_key:
        return None
    return f"input_key and label_key are both {column!r}, so the prompt would hold the answer; set --label-key"


def slices_are_readable(cfg: RunConfig) -> str | None:
    paths = [("prompt_data", cfg.data.prompt_data or "")]
    paths += [("eval_prompt_data", path) for _, path in eval_pairs(cfg)]
    for name, path in paths:
        if "@[" in path and not _SLICE.search(path):
            flag = all_fields()[name].flag
            return f"{name} = {path}: cannot read the slice; write {flag} FILE@[first:end], as Python slices a list"
    return None


def responses_fit_the_context(cfg: RunConfig) -> str | None:
    context = cfg.rollout.rollout_max_context_len
    if context is None:
        return None
    lengths = [("rollout_max_response_len", cfg.rollout.rollout_max_response_len)]
    if cfg.evaluation.eval_max_response_len is not None and evaluates(cfg):
        lengths.append(("eval_max_response_len", cfg.evaluation.eval_max_response_len))
    for name, length in lengths:
        if length >= context:
            flag = all_fields()[name].flag
            return (
                f"{name} = {length} leaves no room for a prompt in rollout_max_context_len = {context};"
                f" lower {flag} or raise --rollout-max-context-len"
            )
    return None


def prompts_leave_room(cfg: RunConfig) -> str | None:
    prompt, context = cfg.data.rollout_max_prompt_len, cfg.rollout.rollout_max_context_len
    if prompt is None or context is None or prompt < context:
        return None
    return (
        f"rollout_max_prompt_len = {prompt} leaves no room for a response in rollout_max_context_len = {context};"
        " lower --rollout-max-prompt-len or raise --rollout-max-context-len"
    )


def one_grader_is_named(cfg: RunConfig) -> str | None:
    built_in, custom = cfg.reward.rm_type, cfg.reward.custom_rm_path
    if built_in is not None and custom is not None:
        return f"rm_type = {built_in} and custom_rm_path = {custom} are both set; pass --rm-type or --custom-rm-path"
    if built_in is None and custom is None and (generates(cfg) or evaluates(cfg)):
        return f"no grader: rm_type and custom_rm_path are unset; pass --rm-type {REWARD_NAMES[0]} or --custom-rm-path"
    return None


def grader_is_known(cfg: RunConfig) -> str | None:
    name = cfg.reward.rm_type
    if name is None or name in REWARD_NAMES:
        return None
    close = nearest(name, REWARD_NAMES)
    hint = f"did you mean --rm-type {close}?" if close else f"--rm-type takes {', '.join(REWARD_NAMES)}"
    return f"rm_type = {name} is not a built-in grader; {hint} Others go through --custom-rm-path"


def custom_grader_can_be_found(cfg: RunConfig) -> str | None:
    path = cfg.reward.custom_rm_path
    if not path or _FILE_FUNCTION.fullmatch(path) or (".py" not in path and _DOTTED_FUNCTION.fullmatch(path)):
        return None
    return (
        f"custom_rm_path = {path} is neither package.module.function nor file.py:function;"
        " write --custom-rm-path in one of these forms"
    )


def grader_has_labels(cfg: RunConfig) -> str | None:
    name = cfg.reward.rm_type
    if name is None or name in _LABEL_FREE_GRADERS or cfg.data.label_key is not None:
        return None
    if generates(cfg):
        return f"rm_type = {name} compares with a reference answer, but label_key is unset; pass --label-key COLUMN"
    if evaluates(cfg) and cfg.evaluation.eval_label_key is None:
        return f"rm_type = {name} compares with a reference answer; pass --eval-label-key (or --label-key) COLUMN"
    return None


def reward_key_needs_a_dict(cfg: RunConfig) -> str | None:
    for name, key in (("reward_key", cfg.reward.reward_key), ("eval_reward_key", cfg.reward.eval_reward_key)):
        if key is not None and cfg.reward.rm_type is not None:
            return (
                f"{name} = {key} picks from a dict, but rm_type = {cfg.reward.rm_type} gives a number;"
                f" drop {all_fields()[name].flag} or use --custom-rm-path"
            )
    return None


def evaluation_has_data_and_interval(cfg: RunConfig) -> str | None:
    interval, data = cfg.evaluation.eval_interval, cfg.evaluation.eval_prompt_data
    if interval is not None and not data:
        return f"eval_interval = {interval}, but eval_prompt_data is empty; pass --eval-prompt-data NAME PATH"
    if data and interval is None and cfg.rollout.num_rollout != 0:
        return (
            f"eval_prompt_data = {' '.join(data)}, but eval_interval is unset, so it would never be used;"
            " pass --eval-interval N, or --no-eval-prompt-data"
        )
    return None


def evaluation_data_is_in_pairs(cfg: RunConfig) -> str | None:
    words = cfg.evaluation.eval_prompt_data
    shown = " ".join(words)
    if len(words) % 2:
        return f"eval_prompt_data = {shown}: an odd number of words is not pairs; pass --eval-prompt-data NAME PATH ..."
    names = [name for name, _ in eval_pairs(cfg)]
    for name in names:
        if not _EVAL_NAME.fullmatch(name) or name.endswith((".jsonl", ".json", ".parquet")):
            return f"eval_prompt_data: {name!r} is no name for metrics; pass --eval-prompt-data NAME PATH ..."
        if names.count(name) > 1:
            return f"eval_prompt_data names {name!r} {names.count(name)} times; give each set of --eval-prompt-data one"
    return None


def evaluation_needs_engines(cfg: RunConfig) -> str | None:
    interval = cfg.evaluation.eval_interval
    if interval is None or not cfg.is_sft:
        return None
    return (
        f"eval_interval = {interval} needs engines, and loss_type = {cfg.algo.loss_type} starts none;"
        " drop --eval-interval and evaluate the exported checkpoint with --num-rollout 0"
    )


RULES = (
    template_arguments_need_the_template,
    columns_differ,
    slices_are_readable,
    responses_fit_the_context,
    prompts_leave_room,
    one_grader_is_named,
    grader_is_known,
    custom_grader_can_be_found,
    grader_has_labels,
    reward_key_needs_a_dict,
    evaluation_has_data_and_interval,
    evaluation_data_is_in_pairs,
    evaluation_needs_engines,
)
