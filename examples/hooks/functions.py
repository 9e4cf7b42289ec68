"""One small function for each hook of a rollout; `docs/hooks.md` says when each is called.

--custom-rm-path examples/hooks/functions.py:reward
--dynamic-sampling-filter-path examples/hooks/functions.py:neither_trivial_nor_hopeless
--buffer-filter-path examples/hooks/functions.py:shortest_first
--rollout-sample-filter-path examples/hooks/functions.py:leave_out_truncated
--rollout-all-samples-process-path examples/hooks/functions.py:count_prompts
--custom-reward-post-process-path examples/hooks/functions.py:relative_to_the_best
--rollout-function-path examples/hooks/functions.py:rollout
"""

from collections import Counter

from rlkit.rollout.hooks import FilterVerdict, WaitingGroup
from rlkit.rollout.job import RolloutJob
from rlkit.types.samples import Sample, SampleGroup, SampleStatus

seen: Counter[int] = Counter()


def reward(response: str, label: object, metadata: dict[str, object]) -> float | None:
    """1 for the label; no reward at all where the row has none."""
    return None if label is None else float(response.strip() == str(label))


def neither_trivial_nor_hopeless(group: SampleGroup) -> FilterVerdict:
    """Groups of which between a tenth and nine tenths are right."""
    rewards = [sample.reward for sample in group.samples if sample.reward is not None]
    share = sum(rewards) / len(rewards) if rewards else 0.0
    if share > 0.9:
        return FilterVerdict(keep=False, reason="trivial")
    if share < 0.1:
        return FilterVerdict(keep=False, reason="hopeless", keep_when_insufficient=True)
    return FilterVerdict(keep=True)


def shortest_first(waiting: list[WaitingGroup], num_groups: int, step: int) -> list[WaitingGroup]:
    """Waiting groups with the fewest tokens so far."""
    return sorted(waiting, key=lambda item: sum(s.response_length for s in item.group.samples))[:num_groups]


def leave_out_truncated(groups: list[SampleGroup]) -> list[Sample]:
    """Responses that ran into the length limit are not trained on."""
    return [s for group in groups for s in group.samples if s.status is SampleStatus.TRUNCATED]


def count_prompts(groups: list[SampleGroup], step: int) -> None:
    """How often each row was answered, filtered or not."""
    seen.update(group.prompt.position for group in groups)


def relative_to_the_best(groups: list[SampleGroup]) -> list[list[float | None]]:
    """Rewards as a share of the best one of their group."""
    shaped: list[list[float | None]] = []
    for group in groups:
        best = max((s.reward for s in group.samples if s.reward is not None), default=0.0)
        shaped.append([None if s.reward is None else s.reward / best if best > 0 else 0.0 for s in group.samples])
    return shaped


async def rollout(job: RolloutJob) -> list[SampleGroup]:
    """Twice as many groups as are wanted; those with the widest spread of rewards are trained on."""
    wanted = job.cfg.rollout.rollout_batch_size
    groups = job.next_groups(2 * wanted)
    await job.run(groups)
    return sorted(groups, key=spread, reverse=True)[:wanted]


def spread(group: SampleGroup) -> float:
    rewards = [sample.reward for sample in group.samples if sample.reward is not None]
    return max(rewards) - min(rewards) if rewards else 0.0
