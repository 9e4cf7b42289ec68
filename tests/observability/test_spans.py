import asyncio

import pytest

from rlkit.observability.spans import SpanName, Spans


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_totals_add_up_until_drained():
    clock = FakeClock()
    spans = Spans(clock)
    for seconds in (1.0, 2.5):
        with spans("generate"):
            clock.now += seconds
    spans.add(SpanName.SYNC, 0.5)
    assert spans.drain() == {"time/generate_s": 3.5, "time/sync_s": 0.5}
    assert spans.drain() == {}


def test_nested_names_both_count_in_full():
    clock = FakeClock()
    spans = Spans(clock)
    with spans("train"):
        clock.now += 1
        with spans("log_prob"):
            clock.now += 2
    assert spans.totals() == {"time/log_prob_s": 2.0, "time/train_s": 3.0}


def test_overlapping_spans_of_one_name_count_once():
    clock = FakeClock()
    spans = Spans(clock)

    async def grade(start: asyncio.Event, stop: asyncio.Event) -> None:
        await start.wait()
        with spans("grade"):
            await stop.wait()

    async def main() -> None:
        events = [asyncio.Event() for _ in range(4)]
        tasks = [asyncio.create_task(grade(events[0], events[2])), asyncio.create_task(grade(events[1], events[3]))]
        for event in events:  # open a, open b, close a, close b: one second apart
            event.set()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            clock.now += 1
        await asyncio.gather(*tasks)

    asyncio.run(main())
    assert spans.totals()["time/grade_s"] == 3.0


def test_a_block_that_raises_is_counted_and_closed():
    clock = FakeClock()
    spans = Spans(clock)
    with pytest.raises(RuntimeError), spans("save"):
        clock.now += 4
        raise RuntimeError
    with spans("save"):
        clock.now += 1
    assert spans.totals() == {"time/save_s": 5.0}


def test_unknown_name_is_refused():
    with pytest.raises(ValueError, match="lunch"), Spans()("lunch"):
        pass
