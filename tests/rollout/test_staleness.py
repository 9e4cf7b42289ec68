"""Age in weight versions, counted for each trained span; the bounds that follow; weights of what is too old."""

import random

import pytest

from rlkit.config.schema import AsyncConfig
from rlkit.rollout.staleness import (
    must_wait,
    oldest_version,
    pool_capacity,
    sample_weights,
    staleness,
    staleness_metrics,
    trained_spans,
)
from rlkit.types.samples import Sample, SampleStatus


def sample(
    versions: list[int], starts: list[int], mask: list[int], status: SampleStatus = SampleStatus.COMPLETED
) -> Sample:
    return Sample(
        group_id=0,
        index=0,
        seed=0,
        tokens=[1] + [2] * len(mask),
        prompt_length=1,
        loss_mask=mask,
        rollout_logprobs=[-1.0] * len(mask),
        status=status,
        weight_versions=versions,
        version_starts=starts,
    )


CASES = {
    "one version": (sample([3], [0], [1, 1]), [(3, 2)], 3),
    "the oldest of three": (sample([3, 4, 6], [0, 2, 3], [1, 1, 1, 1]), [(3, 2), (4, 1), (6, 1)], 3),
    "masked tokens have no age": (sample([3, 4], [0, 2], [0, 0, 1]), [(4, 1)], 4),
    "a span without tokens has no age": (sample([3, 4], [0, 0], [1]), [(4, 1)], 4),
    "nothing trained": (sample([3], [0], [0, 0]), [], None),
    "aborted": (sample([3], [0], [1], SampleStatus.ABORTED), [(3, 1)], None),
}


@pytest.mark.parametrize(("made", "spans", "oldest"), CASES.values(), ids=CASES)
def test_age_is_that_of_the_oldest_trained_span(made: Sample, spans: list[tuple[int, int]], oldest: int | None):
    assert list(trained_spans(made)) == spans
    assert oldest_version([made]) == oldest
    assert staleness(made, 8) == (0 if oldest is None else 8 - oldest)


def test_metrics_speak_of_samples_and_of_tokens():
    samples = [sample([4], [0], [1, 1]), sample([2, 4], [0, 1], [1, 1, 1, 1]), sample([0], [0], [0])]
    found = staleness_metrics(samples, 5)
    assert found == {
        "staleness/mean": (1 + 3) / 2,
        "staleness/max": 3,
        "staleness/token_mean": (2 * 1 + 1 * 3 + 3 * 1) / 6,
        "staleness/mixed_share": 0.5,
    }
    assert staleness_metrics([sample([0], [0], [0])], 5) == {}


def test_weights_decay_for_every_version_too_many():
    options = AsyncConfig(async_mode="full", max_staleness=1, stale_groups="downweight", staleness_decay=0.5)
    samples = [sample([v], [0], [1]) for v in (5, 4, 3, 1)]
    assert sample_weights(options, samples, 5) == [1.0, 1.0, 0.5, 0.125]
    assert sample_weights(AsyncConfig(async_mode="full", stale_groups="drop"), samples, 5) is None
    assert sample_weights(AsyncConfig(), samples, 5) is None


@pytest.mark.parametrize(
    ("limit", "next_step", "engine_version", "batches"),
    [(0, 0, 0, 1), (0, 1, 0, 0), (1, 1, 0, 1), (1, 1, 1, 2), (2, 1, 0, 2), (2, 5, 5, 3), (2, 9, 5, 0)],
)
def test_the_pool_holds_what_can_be_trained_in_time(limit: int, next_step: int, engine_version: int, batches: int):
    capacity = pool_capacity(max_staleness=limit, batch_size=4, next_step=next_step, engine_version=engine_version)
    assert capacity == 4 * batches
    for place in range(capacity):
        assert next_step + place // 4 - engine_version <= limit, "taken in order, none is too stale"
    assert next_step + capacity // 4 - engine_version > limit, "one more would be"


def test_waiting_is_needed_exactly_where_serving_in_order_comes_too_late():
    rng = random.Random(0)
    seen = set()
    for _ in range(3000):
        size, count, step = rng.randint(1, 3), rng.randint(0, 8), rng.randint(0, 4)
        deadlines = [step + rng.randint(0, 4) for _ in range(count)]
        running = [rng.random() < 0.5 for _ in range(count)]
        told = must_wait(deadlines, running, next_step=step, batch_size=size)
        # whoever is late although nothing that runs comes before it cannot be helped by waiting for others
        late = [
            (deadline, place) for place, deadline in enumerate(sorted(deadlines)) if step + place // size > deadline
        ]
        expected = any(
            any(run for due, run in zip(deadlines, running, strict=True) if due <= deadline) for deadline, _ in late
        )
        assert told == expected, (deadlines, running, step, size)
        seen.add(told)
    assert seen == {True, False}


def test_nothing_is_waited_for_where_nothing_runs():
    assert not must_wait([0, 0, 0], [False] * 3, next_step=1, batch_size=1)
    assert must_wait([1, 1], [True, True], next_step=1, batch_size=1)
    assert not must_wait([1, 1], [True, True], next_step=1, batch_size=2)
