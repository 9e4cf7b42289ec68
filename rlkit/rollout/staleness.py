"""How old the weights behind a sample are, and what follows from it. Pure, without a clock: time is counted in weight
versions, and version s is what step s trains. Called by `group_pool.py`, `manager.py` and `training_batch.py`.

The staleness of a trained token is the step that trains on it minus the version that sampled it; that of a sample or a
group is its oldest trained token's. A response over several versions is as old as its first trained span.
"""

from collections.abc import Iterable, Iterator, Sequence

from rlkit.config.schema import AsyncConfig
from rlkit.types.ranks import MetricSet
from rlkit.types.samples import Sample


def trained_spans(sample: Sample) -> Iterator[tuple[int, int]]:
    """(version, trained tokens) of each stretch of the response with a trained token."""
    ends = [*sample.version_starts[1:], sample.response_length]
    for version, start, end in zip(sample.weight_versions, sample.version_starts, ends, strict=True):
        if count := sum(sample.loss_mask[start:end]):
            yield version, count


def oldest_version(samples: Iterable[Sample]) -> int | None:
    """Of the trained tokens; None where no token is trained."""
    versions = (version for sample in samples if sample.status.is_trainable for version, _ in trained_spans(sample))
    return min(versions, default=None)


def staleness(sample: Sample, step: int) -> int:
    """Of the oldest trained token, at `step`; 0 where no token is trained."""
    oldest = oldest_version([sample])
    return 0 if oldest is None else step - oldest


def pool_capacity(*, max_staleness: int, batch_size: int, next_step: int, engine_version: int) -> int:
    """Groups that may be in flight or finished: one more would be trained on, in the order of their dispatch, at a step
    further than `max_staleness` from the weights that begin it.

    The group at place p of the pool is trained on at step `next_step + p // batch_size`. (The bound of AReaL,
    arXiv:2505.24298, section 5.1, counts all groups since the start; this one counts those that are left.)
    """
    return max(0, max_staleness + 1 - (next_step - engine_version)) * batch_size


def must_wait(deadlines: Sequence[int], is_running: Sequence[bool], *, next_step: int, batch_size: int) -> bool:
    """Whether a running group has to be taken now, because later it could not be in time.

    `deadlines` are the last steps at which the groups that would be left may be trained on, `next_step` the first one
    that could take them. By step `next_step + j` the trainer takes `(j + 1) * batch_size` of them, earliest deadline
    first: the test of Liu and Layland (1973) for unit jobs.
    """
    late: dict[int, list[bool]] = {}
    for deadline, running in zip(deadlines, is_running, strict=True):
        late.setdefault(deadline, []).append(running)
    count, has_running = 0, False
    for deadline in sorted(late):
        count += len(late[deadline])
        has_running = has_running or any(late[deadline])
        if has_running and count > max(0, deadline - next_step + 1) * batch_size:
            return True
    return False


def sample_weights(options: AsyncConfig, samples: Sequence[Sample], step: int) -> list[float] | None:
    """`decay ** max(0, staleness - max_staleness)` for each sample; None where nothing is weighed."""
    if not options.is_full or options.stale_groups != "downweight":
        return None
    limit, decay = options.staleness_limit, options.staleness_decay
    return [decay ** max(0, staleness(sample, step) - limit) for sample in samples]


def staleness_metrics(samples: Sequence[Sample], step: int) -> MetricSet:
    """`staleness/...` over samples that are trained on; empty without any."""
    spans = [list(trained_spans(sample)) for sample in samples if sample.status.is_trainable]
    spans = [parts for parts in spans if parts]
    if not spans:
        return {}
    ages = [step - min(version for version, _ in parts) for parts in spans]
    num_tokens = sum(count for parts in spans for _, count in parts)
    return {
        "staleness/mean": sum(ages) / len(ages),
        "staleness/max": max(ages),
        "staleness/token_mean": sum((step - version) * n for parts in spans for version, n in parts) / num_tokens,
        "staleness/mixed_share": sum(len(parts) > 1 for parts in spans) / len(spans),
    }
