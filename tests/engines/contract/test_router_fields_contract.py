"""The router drops request fields that it does not know, without a word: every field that rlkit sends must pass."""

import asyncio

import pytest
from aiohttp import web
from engine_process import free_port, running_router

from rlkit.engines.client import RouterClient
from rlkit.engines.wire import generate_body
from rlkit.types.errors import EngineError
from rlkit.types.generation import FinishReason, GenerateRequest, SamplingParams

ANSWER = {
    "text": "x",
    "output_ids": [5],
    "meta_info": {
        "id": "all-fields",
        "finish_reason": {"type": "stop", "matched": 5},
        "weight_version": "3",
        "output_token_logprobs": [[-0.5, 5, None]],
        "prompt_tokens": 3,
        "cached_tokens": 2,
        "e2e_latency": 0.25,
    },
}
UNUSUAL = GenerateRequest(
    rid="all-fields",
    input_ids=[1, 2, 3],
    sampling=SamplingParams(
        temperature=0.7123456789,
        top_p=0.9,
        top_k=17,
        min_p=0.05,
        max_new_tokens=33,
        min_new_tokens=2,
        stop=("\n\n", "</s>é"),
        stop_token_ids=(7, 9),
        ignore_eos=True,
        skip_special_tokens=False,
        repetition_penalty=1.1,
    ),
    seed=2**63 - 1,
)
PLAIN = GenerateRequest(rid="all-fields", input_ids=[1], sampling=SamplingParams(), seed=0, return_logprob=True)


class Recorder:
    """A worker that answers as an engine and keeps what it was asked."""

    def __init__(self) -> None:
        self.bodies: list[dict] = []
        self.status = 200

    async def generate(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        return web.json_response(ANSWER if self.status == 200 else {"error": {"message": "no"}}, status=self.status)

    async def info(self, _: web.Request) -> web.Response:
        return web.json_response({"model_path": "/no-model", "tokenizer_path": "/no-model", "weight_version": "3"})

    async def serve(self, port: int) -> web.AppRunner:
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        app.router.add_get("/health", self.info)
        app.router.add_get("/model_info", self.info)
        app.router.add_get("/server_info", self.info)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        return runner


@pytest.fixture(scope="module")
def router_url(tmp_path_factory: pytest.TempPathFactory):
    with running_router(tmp_path_factory.mktemp("router")) as url:
        yield url


async def connected(router_url: str, recorder: Recorder, body):
    """Run `body(router)` with the recorder as the router's only worker."""
    port = free_port()
    worker = f"http://127.0.0.1:{port}"
    runner = await recorder.serve(port)
    try:
        async with RouterClient(router_url, timeout_s=30.0) as router:
            await router.add_worker(worker)
            await router.wait_for_workers([worker], timeout_s=30.0)
            result = await body(router)
            await router.remove_worker(worker)
            await router.wait_for_workers([], timeout_s=30.0)
            return result
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("request_", [UNUSUAL, PLAIN], ids=["unusual values", "defaults"])
def test_every_field_passes_the_router_unchanged(router_url: str, request_: GenerateRequest):
    recorder = Recorder()
    answer = asyncio.run(connected(router_url, recorder, lambda router: router.generate(request_)))
    [received] = recorder.bodies
    sent = generate_body(request_, stream=False)
    received_sampling, sent_sampling = received["sampling_params"], sent["sampling_params"]
    assert received_sampling.keys() == sent_sampling.keys()
    for name, value in sent_sampling.items():
        # The router keeps numbers in float32.
        expected = pytest.approx(value, rel=1e-7, abs=0) if isinstance(value, float) else value
        assert received_sampling[name] == expected, name
    assert {name: received.get(name) for name in sent} == sent | {"sampling_params": received_sampling}
    assert (answer.output_ids, answer.logprobs, answer.weight_version) == ([5], [-0.5], 3)
    assert (answer.finish_reason, answer.prompt_tokens, answer.cached_tokens) == (FinishReason.STOP, 3, 2)


@pytest.mark.parametrize("status", [400, 500, 503])
def test_an_error_is_sent_once_and_comes_back_with_its_status(router_url: str, status: int):
    """Retries are the rollout's business: it writes them down."""
    recorder = Recorder()
    recorder.status = status

    async def body(router) -> str:
        with pytest.raises(EngineError) as caught:
            await router.generate(PLAIN)
        return str(caught.value)

    message = asyncio.run(connected(router_url, recorder, body))
    assert f"{router_url}/generate: status {status}" in message
    assert len(recorder.bodies) == 1
