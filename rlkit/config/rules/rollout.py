"""Prompts, sampling, graders and evaluation."""

import difflib
import re

from rlkit.config.fields import all_fields
from rlkit.config.reward_names import REWARD_NAMES
from rlkit.config.rules.required import evaluates, generates
from rlkit.config.schema import RunConfig
from rlkit.config.values import nearest

_SLICE = re.compile(r"@\[-?\d*:-?\d*\]$")
_EVAL_NAME = re.compile(r"[\w.+-]+")
_LABEL_FREE_GRADERS = ("random", "ifbench", "code", "remote_rm", "reward_model")


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
    if built_in is None and custom is None and (generates(cfg) or evaluates(cfg)) and not cfg.agent.has_agent:
        return f"no grader: rm_type and custom_rm_path are unset; pass --rm-type {REWARD_NAMES[0]} or --custom-rm-path"
    return None


def grader_is_known(cfg: RunConfig) -> str | None:
    name = cfg.reward.rm_type
    if name is None or name in REWARD_NAMES:
        return None
    close = nearest(name, REWARD_NAMES)
    hint = f"did you mean --rm-type {close}?" if close else ""
    if not close:
        (nearest_of_all,) = difflib.get_close_matches(name, REWARD_NAMES, n=1, cutoff=0.0)
        hint = f"the nearest is {nearest_of_all}; --rm-type takes {', '.join(REWARD_NAMES)}."
    return f"rm_type = {name} is not a built-in grader; {hint} Others go through --custom-rm-path"


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
        if key is not None and cfg.reward.rm_type not in (None, "remote_rm"):
            return (
                f"{name} = {key} picks from a dict, but rm_type = {cfg.reward.rm_type} gives a number;"
                f" drop {all_fields()[name].flag} or use --custom-rm-path"
            )
    return None


def reward_server_has_an_address(cfg: RunConfig) -> str | None:
    url = cfg.reward.rm_url
    if cfg.reward.rm_type == "remote_rm" and url is None:
        return "rm_type = remote_rm asks a reward server, but rm_url is unset; pass --rm-url http://HOST:PORT/PATH"
    if cfg.reward.rm_type == "reward_model" and (url is None or cfg.reward.rm_model is None):
        return (
            f"rm_type = reward_model asks a server for the scores of a model, but rm_url = {url} and rm_model ="
            f" {cfg.reward.rm_model}; pass --rm-url http://HOST:PORT and --rm-model FOLDER"
        )
    if url is not None and not url.startswith(("http://", "https://")):
        return f"rm_url = {url} is no address; pass --rm-url http://HOST:PORT/PATH"
    if url is not None and cfg.reward.custom_rm_path is not None:
        return f"rm_url = {url} is not used with custom_rm_path = {cfg.reward.custom_rm_path}; drop --rm-url"
    return None


def whole_groups_go_to_a_function(cfg: RunConfig) -> str | None:
    if not cfg.reward.group_rm or cfg.reward.custom_rm_path is not None:
        return None
    return (
        f"group_rm = True hands whole groups to a function, but custom_rm_path is unset and rm_type ="
        f" {cfg.reward.rm_type} grades one response; pass --custom-rm-path, or drop --group-rm"
    )


def evaluation_has_data_and_interval(cfg: RunConfig) -> str | None:
    interval, data, file = cfg.evaluation.eval_interval, cfg.evaluation.eval_prompt_data, cfg.evaluation.eval_config
    if data and file is not None:
        return f"eval_config = {file} and eval_prompt_data = {' '.join(data)} both name sets; drop --eval-prompt-data"
    if file is not None and interval is None and cfg.rollout.num_rollout != 0:
        return f"eval_config = {file}, but eval_interval is unset, so it would never be used; pass --eval-interval N"
    if interval is not None and not data and file is None:
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
    if interval is None or not cfg.is_supervised:
        return None
    return (
        f"eval_interval = {interval} needs engines, and loss_type = {cfg.algo.loss_type} starts none;"
        " drop --eval-interval and evaluate the exported checkpoint with --num-rollout 0"
    )


def ids_that_end_a_response_are_heeded(cfg: RunConfig) -> str | None:
    ids = cfg.rollout.rollout_stop_token_ids
    if not cfg.rollout.rollout_ignore_eos or not ids:
        return None
    return (
        f"rollout_ignore_eos = True lets responses run past rollout_stop_token_ids = {' '.join(map(str, ids))};"
        " drop --rollout-stop-token-ids or --rollout-ignore-eos"
    )


RULES = (
    ids_that_end_a_response_are_heeded,
    template_arguments_need_the_template,
    columns_differ,
    slices_are_readable,
    responses_fit_the_context,
    prompts_leave_room,
    one_grader_is_named,
    grader_is_known,
    grader_has_labels,
    reward_key_needs_a_dict,
    reward_server_has_an_address,
    whole_groups_go_to_a_function,
    evaluation_has_data_and_interval,
    evaluation_data_is_in_pairs,
    evaluation_needs_engines,
)
