"""What the samples of a rollout say about its health, as metrics that `observability/guards.py` reads. Pure; called by
`manager.py`.
"""

from collections.abc import Callable, Collection, Sequence

from rlkit.config.schema import RunConfig
from rlkit.rewards.extract import after_thinking, answer_line, has_box, has_closed_thinking
from rlkit.types.ranks import MetricSet
from rlkit.types.samples import Sample, SampleGroup

MIN_TOKENS = 4
"""Of a response whose log-probs may be judged: two equal ones are chance."""
_BOXED = ("math", "deepscaler")
_LINED = ("dapo",)
_PLAIN_BOX = "boxed_"


def guard_facts(cfg: RunConfig, groups: Sequence[SampleGroup], end_ids: Collection[int]) -> MetricSet:
    """Shares over finished samples; a share is absent where it would mean nothing. `end_ids` end a response."""
    finished = [s for group in groups for s in group.samples if s.status.is_trainable and s.response_length > 0]
    if not finished or cfg.is_supervised:
        return {}
    facts: MetricSet = {"rollout/masked_share": _share(finished, lambda s: not any(s.loss_mask))}
    if not cfg.rollout.rollout_ignore_eos and not cfg.rollout.rollout_stop:
        ends = frozenset(end_ids)
        facts["rollout/eos_share"] = _share(finished, lambda s: has_ended(s, ends))
    judged = [s for s in finished if len(s.rollout_logprobs) >= MIN_TOKENS]
    if judged:
        facts["rollout/placeholder_logprob_share"] = _share(judged, all_equal)
    looks_for = _answer_form(cfg.reward.rm_type)
    is_alone = cfg.reward.custom_rm_path is None and not any("rm_type" in g.prompt.metadata for g in groups)
    if looks_for is not None and is_alone:
        facts["rollout/answer_found_share"] = _share(finished, lambda s: looks_for(s.response))
    if expects_thinking(cfg, groups):
        facts["rollout/closed_thinking_share"] = _share(finished, lambda s: has_closed_thinking(s.response))
    return facts


def expects_thinking(cfg: RunConfig, groups: Sequence[SampleGroup]) -> bool:
    """Whether the grader wants `</think>`, or the prompts open `<think>` themselves."""
    if cfg.reward.rm_type == "deepscaler" and cfg.reward.custom_rm_path is None:
        return True
    return bool(groups) and all(group.prompt.text.rstrip().endswith("<think>") for group in groups)


def _answer_form(rm_type: str | None) -> Callable[[str], bool] | None:
    """Whether a response states its answer where the grader looks; None for graders that read all of it."""
    if rm_type is None:
        return None
    if rm_type in _BOXED or rm_type.startswith(_PLAIN_BOX):
        return lambda response: has_box(after_thinking(response))
    if rm_type in _LINED:
        return lambda response: answer_line(response) is not None
    return None


def has_ended(sample: Sample, ends: Collection[int]) -> bool:
    """Whether an end id is in the response; most often it is the last one."""
    return sample.tokens[-1] in ends or any(token in ends for token in sample.tokens[sample.prompt_length :])


def all_equal(sample: Sample) -> bool:
    """Whether one number stands for all log-probs; most often the second one tells."""
    return all(value == sample.rollout_logprobs[0] for value in sample.rollout_logprobs)


def _share(samples: Sequence[Sample], holds: Callable[[Sample], bool]) -> float:
    return sum(holds(sample) for sample in samples) / len(samples)
