"""What every engine refuses, and that a refusal names place, status and reason."""

import asyncio

import aiohttp
import pytest
from engine_process import RunningEngine, generating
from reference_model import ReferenceModel

from rlkit.engines.client import EngineClient
from rlkit.types.errors import EngineError
from rlkit.types.generation import GenerateRequest, SamplingParams


def refused(engine: RunningEngine, *, input_ids: list[int] | None = None, rid: str = "refused", **sampling) -> str:
    """Message of the error that the request ends with."""
    params = SamplingParams(**({"max_new_tokens": 4} | sampling))
    request = GenerateRequest(rid=rid, input_ids=[1, 2] if input_ids is None else input_ids, sampling=params, seed=0)

    async def body(router, _):
        with pytest.raises(EngineError) as caught:
            await router.generate(request)
        return str(caught.value)

    return engine.run(body)


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        ({"temperature": -1.0}, "temperature must be a non-negative"),
        ({"top_p": 0.0}, "top_p must be in"),
        ({"top_p": 1.5}, "top_p must be in"),
        ({"min_p": 2.0}, "min_p must be in"),
        ({"top_k": 0}, "top_k must be -1"),
        ({"max_new_tokens": 2, "min_new_tokens": 3}, "min_new_tokens must be in"),
    ],
    ids=str,
)
def test_bad_sampling_parameters(engine: RunningEngine, sampling: dict, reason: str):
    message = refused(engine, **sampling)
    assert f"{engine.router_url}/generate: status 400" in message
    assert reason in message


def test_a_prompt_that_fills_the_context(engine: RunningEngine):
    assert "longer than the model's context length (512 tokens)" in refused(
        engine, input_ids=[1] * 512, max_new_tokens=1
    )
    assert "exceeds the maximum allowed length (506 tokens)" in refused(engine, input_ids=[1] * 506, max_new_tokens=1)


def test_more_tokens_than_the_context_holds(engine: RunningEngine):
    assert "You requested a total of 513 tokens" in refused(engine, input_ids=[1] * 10, max_new_tokens=503)


def test_a_response_that_would_fill_the_last_positions_is_shorter(engine: RunningEngine):
    """Both engines keep the last two positions of the context free."""
    request = GenerateRequest(
        rid="last", input_ids=[1] * 500, sampling=SamplingParams(max_new_tokens=12, ignore_eos=True), seed=0
    )

    async def body(router, _):
        return await router.generate(request)

    assert len(engine.run(body).output_ids) == 10


def test_an_empty_prompt(engine: RunningEngine):
    assert "input_ids cannot be empty" in refused(engine, input_ids=[])


def test_an_id_outside_the_vocabulary(embedded: RunningEngine, base: ReferenceModel):
    """SGLang's process ends on it."""
    assert f"the vocabulary has {base.vocab_size} tokens" in refused(embedded, input_ids=[1, 100_000])
    assert "vocabulary" in refused(embedded, input_ids=[-1])


def test_a_second_request_of_the_same_id(engine: RunningEngine):
    def request(num_tokens: int) -> GenerateRequest:
        sampling = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
        return GenerateRequest(rid="twin", input_ids=[1], sampling=sampling, seed=0)

    async def body(router, _):
        async with generating(router, request(200)) as [first]:
            with pytest.raises(EngineError, match="Duplicate request ID detected: twin"):
                await router.generate(request(1))
            return await first

    assert len(engine.run(body).output_ids) == 200


def test_a_refused_stream(engine: RunningEngine):
    request = GenerateRequest(
        rid="s", input_ids=[1], sampling=SamplingParams(temperature=-1.0, max_new_tokens=4), seed=0
    )

    async def body(router, _):
        with pytest.raises(EngineError, match="temperature must be a non-negative"):
            async for _ in router.stream(request):
                pass

    engine.run(body)


def test_bodies_that_are_no_requests(engine: RunningEngine):
    async def status(session, data: bytes) -> tuple[int, dict]:
        headers = {"Content-Type": "application/json"}
        async with session.post(f"{engine.url}/generate", data=data, headers=headers) as response:
            return response.status, await response.json()

    async def body(_, __):
        async with aiohttp.ClientSession() as session:
            return [await status(session, data) for data in (b"{", b'{"input_ids": ["a"]}', b'{"sampling_params": {}}')]

    answers = engine.run(body)
    assert [status for status, _ in answers] == [400, 400, 400]
    assert answers[0][1]["code"] == 400 and answers[0][1]["object"] == "error"


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"repetition_penalty": 1.2},
        {"frequency_penalty": 0.5},
        {"presence_penalty": 0.5},
        {"regex": "a*"},
        {"logit_bias": {"1": 2.0}},
        {"no_such_parameter": 1},
        {"temperature": "hot"},
        {"max_new_tokens": True},
    ],
    ids=str,
)
def test_what_the_embedded_engine_cannot_do_is_refused_and_not_ignored(embedded: RunningEngine, fields: dict):
    async def body(_, __):
        payload = {"input_ids": [1], "sampling_params": fields}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{embedded.url}/generate", json=payload) as response,
        ):
            return response.status, await response.json()

    status, answer = embedded.run(body)
    assert status == 400
    assert next(iter(fields)) in answer["error"]["message"]


def test_an_engine_that_is_not_there():
    async def body() -> None:
        async with EngineClient("http://127.0.0.1:9", timeout_s=5.0) as client:
            assert not await client.is_alive()
            with pytest.raises(EngineError, match=r"http://127\.0\.0\.1:9/model_info: no answer"):
                await client.model_info()

    asyncio.run(body())


def test_a_path_that_the_engine_does_not_have(engine: RunningEngine):
    async def body(router, _):
        with pytest.raises(EngineError, match="/pause_generation: status 404"):
            await router.pause("abort")  # control calls belong to the engine's own address

    engine.run(body)
