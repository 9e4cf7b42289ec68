"""The engine thread without HTTP: what its limits must not change, and what it does when the model fails it."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from reference_model import ReferenceModel
from tiny_model import make_tokenizer

from rlkit.engines.embedded.engine import Engine
from rlkit.engines.embedded.model import ModelRunner, load_model
from rlkit.engines.embedded.protocol import RequestReader
from rlkit.engines.embedded.request import EngineRequest, Output

TIMEOUT_S = 60.0


@dataclass
class Harness:
    """A running engine, and its outputs as they are delivered."""

    engine: Engine
    reader: RequestReader
    crashed: threading.Event
    _finals: dict[int, Output] = field(default_factory=dict)
    _arrived: threading.Condition = field(default_factory=threading.Condition)

    def deliver(self, outputs: list[Output]) -> None:
        with self._arrived:
            self._finals |= {id(output.request): output for output in outputs if output.is_final}
            self._arrived.notify_all()

    def submit(self, prompt: list[int], *, seed: int, max_new_tokens: int, **fields) -> EngineRequest:
        sampling = {"max_new_tokens": max_new_tokens, "ignore_eos": True, "sampling_seed": seed}
        body = {"input_ids": prompt, "return_logprob": True, "sampling_params": sampling}
        request = self.reader.read(body | fields)
        self.engine.submit(request)
        return request

    def wait(self, requests: list[EngineRequest]) -> None:
        with self._arrived:
            done = self._arrived.wait_for(lambda: all(id(r) in self._finals for r in requests), timeout=TIMEOUT_S)
        assert done, "requests did not end"


@pytest.fixture
def start(base_folder) -> Iterator:
    """Starts engines over the base checkpoint; stops them at the end."""
    engines: list[Engine] = []

    def start_engine(*, max_running: int = 16, max_total_tokens: int = 10**6, prefill_tokens: int = 512) -> Harness:
        model = load_model(str(base_folder), device="cpu", dtype="float32", trust_remote_code=False)
        runner = ModelRunner(model, max_slots=max_running, context_length=512)
        crashed = threading.Event()
        deliveries: list[Harness] = []
        engine = Engine(
            runner,
            weight_version="0",
            max_running_requests=max_running,
            max_total_tokens=max_total_tokens,
            prefill_tokens=prefill_tokens,
            deliver=lambda outputs: deliveries[0].deliver(outputs),
            on_crash=crashed.set,
        )
        reader = RequestReader(
            tokenizer=make_tokenizer(), eos_ids=frozenset(), vocab_size=264, context_length=512, seed=0
        )
        deliveries.append(Harness(engine=engine, reader=reader, crashed=crashed))
        engine.start()
        engines.append(engine)
        return deliveries[0]

    yield start_engine
    for engine in engines:
        engine.stop()


def run_traffic(harness: Harness) -> list[EngineRequest]:
    generator = torch.Generator().manual_seed(0)
    requests = []
    for group in range(3):
        prompt = torch.randint(0, 256, (3 + 11 * group,), generator=generator).tolist()
        for index in range(3):
            requests.append(harness.submit(prompt, seed=10 * group + index, max_new_tokens=100 + 5 * index))
    harness.wait(requests)
    return requests


def assert_same_answers(requests: list[EngineRequest], others: list[EngineRequest]) -> None:
    for request, other in zip(requests, others, strict=True):
        assert request.output_ids == other.output_ids
        torch.testing.assert_close(torch.tensor(request.logprobs), torch.tensor(other.logprobs), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "limits",
    [{"max_running": 2}, {"prefill_tokens": 5}, {"max_total_tokens": 500}, {"max_running": 1, "prefill_tokens": 1}],
    ids=str,
)
def test_limits_change_when_a_token_comes_and_not_which(start, limits: dict):
    roomy, limited = start(), start(**limits)
    expected, found = run_traffic(roomy), run_traffic(limited)
    assert_same_answers(found, expected)
    if "max_total_tokens" in limits:
        assert any(request.num_retractions for request in found)
        cache = limited.engine.runner.cache
        assert cache.num_slots * cache.length <= 500 + 64 * cache.num_slots


def test_prompts_scored_in_pieces_are_scored_right(start, base: ReferenceModel):
    harness = start(prefill_tokens=7)
    prompt = [(5 * index) % 256 for index in range(40)]
    requests = [
        harness.submit(prompt, seed=1, max_new_tokens=2, logprob_start_len=start_len) for start_len in (0, 13, 39)
    ]
    harness.wait(requests)
    expected = base.logprobs(prompt[:1], prompt[1:])
    for request, start_len in zip(requests, (0, 13, 39), strict=True):
        torch.testing.assert_close(
            torch.tensor(request.input_logprobs), torch.tensor(expected[start_len:]), atol=1e-4, rtol=0
        )


def test_a_request_of_no_tokens_ends_after_its_prompt(start):
    harness = start()
    request = harness.submit([1, 2, 3], seed=0, max_new_tokens=0, logprob_start_len=0)
    harness.wait([request])
    assert request.finish == {"type": "length", "length": 0}
    assert request.output_ids == [] and len(request.input_logprobs) == 2


def test_logits_that_are_not_finite_end_the_request_with_an_error(start):
    harness = start()
    healthy = harness.submit([1, 2], seed=0, max_new_tokens=3)
    harness.wait([healthy])
    norm = harness.engine.runner.model.get_parameter("model.norm.weight")
    harness.engine.call(lambda: norm.fill_(torch.nan)).result(TIMEOUT_S)
    broken = harness.submit([1, 2], seed=0, max_new_tokens=3)
    harness.wait([broken])
    assert broken.finish is not None and broken.finish["status_code"] == 500
    assert harness.engine.scheduler.is_idle


def test_an_error_in_a_pass_is_reported_as_a_crash(start, caplog: pytest.LogCaptureFixture):
    harness = start()

    def fail(*_):
        raise RuntimeError("out of memory")

    harness.engine.runner.decode = fail
    harness.submit([1, 2], seed=0, max_new_tokens=3)
    assert harness.crashed.wait(TIMEOUT_S)
    assert "out of memory" in caplog.text
