"""What functions of the user get and return: the types of the hooks of a rollout, and the built-in filters.

`config/hooks.py` names the flags and checks signatures; `docs/hooks.md` has an example of each.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from rlkit.config.hooks import HOOKS, load_function
from rlkit.config.rules.sampling import short_name
from rlkit.config.schema import RunConfig
from rlkit.rollout.metrics import is_zero_variance, scored_rewards
from rlkit.types.errors import RlkitError
from rlkit.types.samples import Sample, SampleGroup


class HookError(RlkitError, ValueError):
    """A function of the user returned something that cannot be used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FilterVerdict:
    """What a dynamic sampling filter says of a finished group."""

    keep: bool
    reason: str = ""
    """Why it is dropped; counted as `rollout/dynamic_filter/drop_<reason>`."""
    keep_when_insufficient: bool = False
    """Take the group after all where dropping it would need another round of sampling."""


@dataclass(kw_only=True, slots=True)
class WaitingGroup:
    """A group that was cut off and waits for a later step."""

    group: SampleGroup
    first_step: int
    """Step in which its prompt was drawn."""
    num_continued: int = 0
    """Steps that took it up again."""


GroupFilter = Callable[[SampleGroup], FilterVerdict]
BufferFilter = Callable[[list[WaitingGroup], int, int], list[WaitingGroup]]


def check_reward_nonzero_std(group: SampleGroup) -> FilterVerdict:
    """Keep a group whose scored rewards differ: equal ones have no advantage and teach nothing (DAPO, arXiv:2503.14476,
    section 3.2).
    """
    rewards = scored_rewards(group)
    if not rewards:
        return FilterVerdict(keep=False, reason="unscored")
    if is_zero_variance(rewards):
        return FilterVerdict(keep=False, reason=f"zero_std_{rewards[0]:.1f}")
    return FilterVerdict(keep=True)


def check_reward_nonzero_std_with_fallback(group: SampleGroup) -> FilterVerdict:
    """The same, but a scored group of equal rewards fills the batch where another round of sampling would be needed."""
    verdict = check_reward_nonzero_std(group)
    is_scored = bool(scored_rewards(group))
    return FilterVerdict(
        keep=verdict.keep, reason=verdict.reason, keep_when_insufficient=not verdict.keep and is_scored
    )


def pop_first(waiting: list[WaitingGroup], num_groups: int, step: int) -> list[WaitingGroup]:
    """The groups that wait longest."""
    return waiting[:num_groups]


_BUILT_IN: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (check_reward_nonzero_std, check_reward_nonzero_std_with_fallback, pop_first)
}


def load_group_filter(path: str | None) -> GroupFilter | None:
    """The filter of `--dynamic-sampling-filter-path`; its answers are checked."""
    if path is None:
        return None
    function = _load("dynamic_sampling_filter_path", path)

    def judge(group: SampleGroup) -> FilterVerdict:
        answer = function(group)
        if isinstance(answer, FilterVerdict):
            return answer
        if isinstance(answer, bool):
            return FilterVerdict(keep=answer, reason="" if answer else "filtered")
        raise _wrong("dynamic_sampling_filter_path", path, answer)

    return judge


def load_buffer_filter(path: str | None) -> BufferFilter:
    """The function of `--buffer-filter-path`; what it returns must be among what it was given, each once."""
    if path is None:
        return pop_first
    function = _load("buffer_filter_path", path)

    def choose(waiting: list[WaitingGroup], num_groups: int, step: int) -> list[WaitingGroup]:
        chosen = function(list(waiting), num_groups, step)
        known = {id(item) for item in waiting}
        is_list = isinstance(chosen, list) and len(chosen) <= num_groups
        if (
            not is_list
            or not {id(item) for item in chosen} <= known
            or len({id(item) for item in chosen}) < len(chosen)
        ):
            raise HookError(
                f"--buffer-filter-path {path} must return a list of at most {num_groups} of the groups it was given, "
                f"each once; it returned {str(chosen)[:200]}"
            )
        return chosen

    return choose


def load_sample_filter(path: str | None) -> Callable[[list[SampleGroup]], None] | None:
    """The function of `--rollout-sample-filter-path`, as one that masks the samples it names."""
    if path is None:
        return None
    function = _load("rollout_sample_filter_path", path)

    def leave_out(groups: list[SampleGroup]) -> None:
        known = {id(sample) for group in groups for sample in group.samples}
        chosen = function(groups)
        if not isinstance(chosen, Iterable):
            raise _wrong("rollout_sample_filter_path", path, chosen)
        for sample in chosen:
            if not isinstance(sample, Sample) or id(sample) not in known:
                raise HookError(
                    f"--rollout-sample-filter-path {path} named {str(sample)[:200]}, no sample of the batch"
                )
            sample.loss_mask = [0] * sample.response_length

    return leave_out


def load_reward_post_process(path: str | None) -> Callable[[list[SampleGroup]], None] | None:
    """The function of `--custom-reward-post-process-path`, as one that writes the rewards it returns."""
    if path is None:
        return None
    function = _load("custom_reward_post_process_path", path)

    def shape(groups: list[SampleGroup]) -> None:
        rewards = function(groups)
        lengths = [len(group.samples) for group in groups]
        if not isinstance(rewards, Sequence) or [len(row) for row in rewards] != lengths:
            told = f"{len(groups)} lists with a number (or None) for each sample"
            raise HookError(f"--custom-reward-post-process-path {path} must return {told}, got {str(rewards)[:200]}")
        for group, row in zip(groups, rewards, strict=True):
            for sample, reward in zip(group.samples, row, strict=True):
                sample.reward = None if reward is None else float(reward)

    return shape


def load_all_samples_process(path: str | None) -> Callable[[list[SampleGroup], int], None] | None:
    """The function of `--rollout-all-samples-process-path`."""
    return None if path is None else _load("rollout_all_samples_process_path", path)


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutHooks:
    """The functions of the user that a run calls; None where a flag is unset."""

    group_filter: GroupFilter | None
    leave_out: Callable[[list[SampleGroup]], None] | None
    process_all: Callable[[list[SampleGroup], int], None] | None
    shape_rewards: Callable[[list[SampleGroup]], None] | None

    @classmethod
    def load(cls, cfg: RunConfig) -> Self:
        """ConfigError, with the right signature, for one that cannot be used."""
        rollout = cfg.rollout
        return cls(
            group_filter=load_group_filter(rollout.dynamic_sampling_filter_path),
            leave_out=load_sample_filter(rollout.rollout_sample_filter_path),
            process_all=load_all_samples_process(rollout.rollout_all_samples_process_path),
            shape_rewards=load_reward_post_process(cfg.reward.custom_reward_post_process_path),
        )


def _load(field: str, path: str) -> Callable[..., Any]:
    name = short_name(path)
    return _BUILT_IN[name] if name in HOOKS[field].built_in else load_function(HOOKS[field], path)


def _wrong(field: str, path: str, answer: object) -> HookError:
    hook = HOOKS[field]
    return HookError(f"{hook.flag} {path} returned {str(answer)[:200]!r}; its signature is {hook.signature}")
