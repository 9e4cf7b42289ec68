import itertools
import random

import pytest

from rlkit.engines.embedded.request import EngineRequest
from rlkit.engines.embedded.scheduler import Ready, Scheduler
from rlkit.types.generation import SamplingParams


class NoText:
    """Text is not what these tests are about."""

    def read(self, output_ids, *, is_final=False):
        return ""


def make_request(
    prompt: list[int], *, max_new_tokens: int = 4, rid: str = "r", logprob_start: int = -1
) -> EngineRequest:
    return EngineRequest(
        rid=rid,
        prompt=prompt,
        sampling=SamplingParams(max_new_tokens=max_new_tokens),
        seed=0,
        stop_ids=frozenset({99}),
        suppressed_ids=[],
        text=NoText(),  # pyright: ignore[reportArgumentType]
        finder=None,
        return_logprob=True,
        logprob_start=logprob_start,
        stream=False,
        no_stop_trim=False,
        arrival_s=0.0,
    )


class FakeCache:
    """Tokens in place of keys and values: what each slot holds, position by position."""

    def __init__(self) -> None:
        self.slots: dict[int, list[int]] = {}

    def copy(self, source: int, target: int, length: int) -> None:
        self.slots[target] = self.slots.get(source, [])[:length]


class Driver:
    """Runs a scheduler as the engine does, and checks its invariants after every pass."""

    def __init__(self, *, max_running: int = 4, max_total_tokens: int = 10_000, prefill_tokens: int = 8) -> None:
        self.cache = FakeCache()
        self.scheduler: Scheduler[tuple[int, ...]] = Scheduler(
            max_running=max_running, max_total_tokens=max_total_tokens, move_slot=self.cache.copy
        )
        self.prefill_tokens = prefill_tokens
        self.num_computed_tokens = 0
        self.finished: list[EngineRequest] = []

    def step(self) -> None:
        self.start(self.scheduler.admit())
        pieces = self.scheduler.plan_prefill(self.prefill_tokens)
        assert sum(piece.stop - piece.start for piece in pieces) <= self.prefill_tokens
        for piece in pieces:
            held = self.cache.slots.get(piece.request.slot, [])[: piece.start]
            self.cache.slots[piece.request.slot] = held + piece.request.tokens()[piece.start : piece.stop]
            self.num_computed_tokens += piece.stop - piece.start
        ready = []
        for piece in pieces:
            # In place of logits: the tokens that they depend on.
            ready += self.scheduler.finish_piece(piece, lambda piece=piece: tuple(piece.request.tokens()))
        self.start(ready)
        if not pieces and self.scheduler.running:
            self.scheduler.keep_within_budget()
            running = list(self.scheduler.running)
            for request in running:
                self.cache.slots[request.slot].append(request.output_ids[-1])
                request.num_computed += 1
            self.sample([(request, tuple(request.tokens())) for request in running])
        self.check()

    def start(self, ready: list[Ready[tuple[int, ...]]]) -> None:
        for entry in ready:
            if entry.source is not entry.request:
                self.cache.copy(entry.source.slot, entry.request.slot, entry.request.num_computed)
        self.sample([(entry.request, entry.next_logits) for entry in ready])

    def sample(self, rows: list[tuple[EngineRequest, tuple[int, ...]]]) -> None:
        finished = []
        for request, seen in rows:
            assert list(seen) == request.tokens(), "sampled from logits of other tokens"
            request.output_ids.append(len(request.output_ids) + 50)
            request.check_finished()
            if request.finish is not None:
                finished.append(request)
        self.scheduler.release_finished(finished)
        self.finished += finished

    def check(self) -> None:
        for slot, request in enumerate(self.scheduler.running):
            assert request.slot == slot
            held = self.cache.slots.get(slot, [])[: request.num_computed]
            assert held == request.tokens()[: request.num_computed], "a slot holds other tokens than its request's"
        for request in self.scheduler.waiting:
            assert request.slot == -1

    def run(self, max_steps: int = 500) -> None:
        for _ in range(max_steps):
            if self.scheduler.is_idle:
                return
            self.step()
        pytest.fail("the scheduler does not come to an end")


def test_a_group_with_one_prompt_computes_it_once():
    driver = Driver(max_running=8)
    group = [make_request([1, 2, 3, 4, 5]) for _ in range(8)]
    for request in group:
        driver.scheduler.add(request)
    driver.run()
    assert driver.num_computed_tokens == 5
    assert [request.cached_tokens for request in group] == [0] + [5] * 7


def test_a_late_member_copies_from_one_that_still_runs():
    driver = Driver()
    first, late = make_request([1, 2, 3], max_new_tokens=6), make_request([1, 2, 3], max_new_tokens=2)
    driver.scheduler.add(first)
    for _ in range(3):
        driver.step()
    driver.scheduler.add(late)
    driver.run()
    assert driver.num_computed_tokens == 3
    assert late.cached_tokens == 3


def test_nothing_is_copied_after_the_weights_changed():
    driver = Driver()
    first, late = make_request([1, 2, 3], max_new_tokens=9), make_request([1, 2, 3])
    driver.scheduler.add(first)
    for _ in range(3):
        driver.step()
    driver.scheduler.forget_shared()
    driver.scheduler.add(late)
    driver.run()
    assert driver.num_computed_tokens == 6
    assert late.cached_tokens == 0


def test_the_weights_change_while_a_prompt_is_being_computed_for_a_group():
    driver = Driver(prefill_tokens=2)
    group = [make_request([1, 2, 3, 4, 5]) for _ in range(3)]
    for request in group:
        driver.scheduler.add(request)
    driver.step()
    driver.scheduler.forget_shared()
    driver.run()
    assert len(driver.finished) == 3


@pytest.mark.parametrize("victim", [0, 1], ids=["the one that computes", "a follower"])
def test_abort_while_a_shared_prompt_is_half_computed(victim: int):
    driver = Driver(prefill_tokens=2)
    group = [make_request([1, 2, 3, 4, 5]) for _ in range(3)]
    for request in group:
        driver.scheduler.add(request)
    driver.step()
    aborted = driver.scheduler.abort(lambda request: request is group[victim])
    assert aborted == [group[victim]] and group[victim].finish is not None
    assert group[victim].finish["type"] == "abort"
    driver.check()
    driver.run()
    assert {id(request) for request in driver.finished} == {id(r) for r in group} - {id(group[victim])}


def test_retracted_requests_keep_their_tokens_and_their_order():
    driver = Driver(max_running=3)
    requests = [make_request([10 + i, 11], max_new_tokens=6) for i in range(5)]
    for request in requests:
        driver.scheduler.add(request)
    for _ in range(4):
        driver.step()
    so_far = [list(request.output_ids) for request in requests]
    driver.scheduler.retract_all()
    driver.check()
    assert list(driver.scheduler.waiting) == requests
    assert [request.output_ids for request in requests] == so_far
    assert requests[0].num_retractions == 1 and requests[4].num_retractions == 0
    driver.run()
    assert all(request.output_ids == [50, 51, 52, 53, 54, 55] for request in requests)


def test_the_token_budget_sends_the_youngest_back_and_everyone_still_finishes():
    driver = Driver(max_running=8, max_total_tokens=220)
    requests = [make_request([i, i, i], max_new_tokens=100) for i in range(4)]
    for request in requests:
        driver.scheduler.add(request)
    largest = 0
    while not driver.scheduler.is_idle:
        driver.step()
        running = driver.scheduler.running
        if len(running) > 1:
            largest = max(largest, len(running) * max(request.num_tokens for request in running))
    assert largest <= 220
    assert len(driver.finished) == 4
    assert requests[0].num_retractions == 0


def test_a_request_larger_than_the_budget_runs_alone():
    driver = Driver(max_total_tokens=10)
    for _ in range(2):
        driver.scheduler.add(make_request(list(range(20))))
    driver.run()
    assert len(driver.finished) == 2


def test_finished_in_sgl_order_length_before_stop_id():
    request = make_request([1], max_new_tokens=1)
    request.output_ids = [99]
    request.check_finished()
    assert request.finish == {"type": "length", "length": 1}
    request = make_request([1], max_new_tokens=2)
    request.output_ids = [99]
    request.check_finished()
    assert request.finish == {"type": "stop", "matched": 99}


@pytest.mark.parametrize("seed", range(6))
def test_random_traffic_keeps_every_invariant(seed: int):
    rng = random.Random(seed)
    driver = Driver(max_running=5, max_total_tokens=rng.choice([60, 400]), prefill_tokens=rng.choice([1, 3, 16]))
    names = itertools.count()
    submitted: list[EngineRequest] = []
    aborted: list[EngineRequest] = []
    for _ in range(150):
        for _ in range(rng.choice([0, 0, 1, 3])):
            prompt = [rng.randrange(3)] * rng.randrange(1, 9)
            request = make_request(prompt, max_new_tokens=rng.randrange(1, 12), rid=f"{next(names)}-")
            submitted.append(request)
            driver.scheduler.add(request)
        match rng.randrange(30):
            case 0:
                driver.scheduler.retract_all()
            case 1:
                driver.scheduler.forget_shared()
            case 2:
                rid = f"{rng.randrange(1 + len(submitted))}-"
                aborted += driver.scheduler.abort(lambda request, rid=rid: request.matches(rid))
            case _:
                pass
        driver.check()
        driver.step()
    driver.run(5000)
    assert len(driver.finished) + len(aborted) == len(submitted)
    for request in driver.finished:
        assert len(request.output_ids) == request.sampling.max_new_tokens
