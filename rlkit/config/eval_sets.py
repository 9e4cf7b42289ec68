"""Evaluation sets as a run uses them: the pairs of `--eval-prompt-data`, or the file of `--eval-config`, with what they
do not say filled in from the `--eval-*` flags and then from the rollout's.

A file is YAML or TOML: `eval.datasets` is a list of tables with `name` and `path`, `eval.defaults` a table for all of
them. Read by rules and by `rollout/evaluate.py`.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, cast, get_args, get_type_hints

from rlkit.config.bounds import BOUNDS, Bound
from rlkit.config.errors import ConfigError
from rlkit.config.schema import RunConfig
from rlkit.config.values import nearest

_EVAL_NAME = re.compile(r"[\w.+-]+")

_FLAG_OF = {
    "n_samples_per_eval_prompt": "n_samples_per_eval_prompt",
    "temperature": "eval_temperature",
    "top_p": "eval_top_p",
    "top_k": "eval_top_k",
    "max_response_len": "eval_max_response_len",
    "max_prompt_len": "eval_max_prompt_len",
    "min_new_tokens": "eval_min_new_tokens",
}
_BOUND_OF = {
    **{name: next(bound for bound in BOUNDS if bound.field == flag) for name, flag in _FLAG_OF.items()},
    "repetition_penalty": Bound(field="repetition_penalty", low=0, low_open=True, high=2),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSet:
    """One evaluation set. Its fields are the keys of a file; slime's names."""

    name: str
    path: str
    input_key: str
    label_key: str | None
    tool_key: str
    metadata_key: str
    category_key: str | None = None
    """Key of the metadata by which scores are also told apart."""
    apply_chat_template: bool
    apply_chat_template_kwargs: dict[str, Any]
    metadata_overrides: dict[str, Any] = field(default_factory=dict[str, Any])
    """Put into the metadata of every row."""
    rm_type: str | None
    custom_rm_path: str | None
    reward_key: str | None
    n_samples_per_eval_prompt: int
    temperature: float
    top_p: float
    top_k: int
    max_response_len: int
    max_prompt_len: int | None
    min_new_tokens: int
    repetition_penalty: float = 1.0
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    skip_special_tokens: bool


def eval_sets(cfg: RunConfig) -> list[EvalSet]:
    """Every evaluation set of the run. ConfigError names the file, the set and the key that are wrong."""
    base = _inherited(cfg)
    if cfg.evaluation.eval_config is not None:
        sets = _from_file(cfg.evaluation.eval_config, base)
    else:
        words = cfg.evaluation.eval_prompt_data
        if len(words) % 2:
            raise ConfigError(f"--eval-prompt-data takes pairs `name path`; {words[-1]!r} has no path")
        sets = [replace(base, name=name, path=path) for name, path in zip(words[::2], words[1::2], strict=True)]
    for item in sets:
        if problem := _problem(item):
            where = cfg.evaluation.eval_config or "--eval-prompt-data"
            raise ConfigError(f"{where}, set {item.name!r}: {problem}")
    names = [item.name for item in sets]
    if twice := [name for name in names if names.count(name) > 1]:
        where = cfg.evaluation.eval_config or "--eval-prompt-data"
        raise ConfigError(f"{where}: a name is given twice: {', '.join(twice)}")
    return sets


def _problem(item: EvalSet) -> str | None:
    """What a number of the set must not be: the same as the flag that it stands for."""
    for name, bound in _BOUND_OF.items():
        value = getattr(item, name)
        if value is not None and (problem := bound.problem(value)):
            return f"{name} = {problem}"
    if item.min_new_tokens > item.max_response_len:
        most = f"max_response_len = {item.max_response_len}"
        return f"min_new_tokens = {item.min_new_tokens} must be at least 0 and at most {most}"
    return None


def _inherited(cfg: RunConfig) -> EvalSet:
    """What a set is that says nothing but its name and path."""
    flags, rollout = cfg.evaluation, cfg.rollout
    return EvalSet(
        name="",
        path="",
        input_key=flags.eval_input_key or cfg.data.input_key,
        label_key=flags.eval_label_key or cfg.data.label_key,
        tool_key=flags.eval_tool_key or cfg.data.tool_key,
        metadata_key=cfg.data.metadata_key,
        category_key=flags.eval_category_key,
        apply_chat_template=cfg.data.apply_chat_template,
        apply_chat_template_kwargs=cfg.data.apply_chat_template_kwargs,
        rm_type=cfg.reward.rm_type,
        custom_rm_path=cfg.reward.custom_rm_path,
        reward_key=cfg.reward.eval_reward_key or cfg.reward.reward_key,
        n_samples_per_eval_prompt=flags.n_samples_per_eval_prompt,
        temperature=_first(flags.eval_temperature, rollout.rollout_temperature),
        top_p=_first(flags.eval_top_p, rollout.rollout_top_p),
        top_k=_first(flags.eval_top_k, rollout.rollout_top_k),
        max_response_len=_first(flags.eval_max_response_len, rollout.rollout_max_response_len),
        max_prompt_len=_first(flags.eval_max_prompt_len, cfg.data.rollout_max_prompt_len),
        min_new_tokens=flags.eval_min_new_tokens,
        stop=rollout.rollout_stop,
        stop_token_ids=rollout.rollout_stop_token_ids,
        skip_special_tokens=rollout.rollout_skip_special_tokens,
    )


def _from_file(path: str, base: EvalSet) -> list[EvalSet]:
    whole = _read(path)
    table = _table(whole.get("eval", whole), f"--eval-config {path}: eval")
    given_sets = table.get("datasets")
    if not isinstance(given_sets, list) or not given_sets:
        raise ConfigError(f"--eval-config {path}: there must be a list `datasets` (below `eval`) with a set or more")
    if unknown := table.keys() - {"datasets", "defaults"}:
        raise ConfigError(f"--eval-config {path}: unknown key {sorted(unknown)[0]!r}; beside `datasets` is `defaults`")
    base = _with(base, table.get("defaults") or {}, where=f"--eval-config {path}: defaults")
    sets: list[EvalSet] = []
    for number, given in enumerate(cast("list[Any]", given_sets)):
        where = f"--eval-config {path}: datasets[{number}]"
        made = _with(base, given, where=where)
        if not made.name or not made.path:
            raise ConfigError(f"{where} needs `name` and `path`")
        if not _EVAL_NAME.fullmatch(made.name):
            raise ConfigError(f"{where}: {made.name!r} is no name for metrics; letters, digits and . + - _ are")
        sets.append(made)
    return sets


def _read(path: str) -> Mapping[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--eval-config {path} cannot be read: {error}") from error
    if path.endswith(".toml"):
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"--eval-config {path} is not TOML: {error}") from error
    import yaml  # here: runs without such a file need none

    try:
        table = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--eval-config {path} is not YAML: {error}") from error
    return _table(table, f"--eval-config {path}")


def _table(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} must be a table, this is {str(value)[:80]!r}")
    return cast("Mapping[str, Any]", value)


def _with(base: EvalSet, given: Any, *, where: str) -> EvalSet:
    hints = get_type_hints(EvalSet)
    known = [item.name for item in fields(EvalSet)]
    changes: dict[str, Any] = {}
    for key, value in _table(given, where).items():
        if key not in known:
            close = nearest(str(key), known)
            raise ConfigError(f"{where}: unknown key {key!r}; did you mean {close!r}? There are {', '.join(known)}")
        changes[key] = _typed(value, hints[key], f"{where}: {key}")
    if "rm_type" in changes and "custom_rm_path" not in changes:
        changes["custom_rm_path"] = None  # the set's own choice, whatever the run's is
    if "custom_rm_path" in changes and "rm_type" not in changes:
        changes["rm_type"] = None
    return replace(base, **changes)


def _typed(value: Any, hint: Any, where: str) -> Any:
    wanted = get_args(hint) or (hint,)
    if wanted[-1] is Ellipsis:  # tuple[x, ...]
        items = cast("list[Any]", value if isinstance(value, list) else [value])
        return tuple(_typed(item, wanted[0], where) for item in items)
    if hint is not bool and isinstance(value, bool):
        raise ConfigError(f"{where} = {value} must not be a truth value")
    if hint is float and isinstance(value, int):
        return float(value)
    allowed = dict if "dict" in str(hint) else tuple(kind for kind in wanted if isinstance(kind, type))
    if not isinstance(value, allowed):
        raise ConfigError(f"{where} = {value!r} must be {getattr(hint, '__name__', str(hint))}")
    return value


def _first(override: Any, default: Any) -> Any:
    return default if override is None else override
