"""What every engine promises about aborting, pausing, flushing, sleeping and telling how it is."""

import asyncio
import itertools

import aiohttp
import pytest
import torch
from engine_process import FIRST_VERSION, RunningEngine, eventually, generating
from reference_model import ReferenceModel

from rlkit.types.errors import EngineError
from rlkit.types.generation import FinishReason, GenerateRequest, Generation, SamplingParams

NAMES = itertools.count()
LONG = 480
"""Tokens of a response that a test means to interrupt."""


def long_request(prompt: list[int], *, num_tokens: int = LONG, name: str | None = None) -> GenerateRequest:
    return GenerateRequest(
        rid=name or f"control-{next(NAMES)}.",
        input_ids=prompt,
        sampling=SamplingParams(max_new_tokens=num_tokens, ignore_eos=True),
        seed=1,
    )


def assert_is_partial(answer: Generation, model: ReferenceModel, prompt: list[int]) -> None:
    """Aborted, with the tokens so far and their log-probs."""
    assert answer.finish_reason is FinishReason.ABORT
    assert 0 < len(answer.output_ids) < LONG
    assert answer.text == model.tokenizer.decode(answer.output_ids)
    torch.testing.assert_close(
        torch.tensor(answer.logprobs), torch.tensor(model.logprobs(prompt, answer.output_ids)), atol=1e-4, rtol=0
    )


def test_an_abort_keeps_the_tokens_so_far(engine: RunningEngine, base: ReferenceModel):
    first, second, third = [1, 2], [3, 4], [5, 6]

    async def body(router, control):
        requests = [long_request(first), long_request(second), long_request(third, num_tokens=30)]
        async with generating(router, *requests) as tasks:
            await control.abort(requests[0].rid)
            await eventually(lambda: is_done(tasks[0]))
            await control.abort(requests[1].rid)
            return await asyncio.gather(*tasks)

    answers = engine.run(body)
    assert_is_partial(answers[0], base, first)
    assert_is_partial(answers[1], base, second)
    assert answers[2].finish_reason is FinishReason.LENGTH  # nobody asked for its end


async def is_done(task: asyncio.Task) -> bool:
    return task.done()


def test_an_abort_of_everything(engine: RunningEngine, base: ReferenceModel):
    prompts = [[10 + index, 11] for index in range(5)]

    async def body(router, control):
        async with generating(router, *map(long_request, prompts)) as tasks:
            await control.abort(None)
            return await asyncio.gather(*tasks)

    for prompt, answer in zip(prompts, engine.run(body), strict=True):
        assert_is_partial(answer, base, prompt)


def test_an_abort_of_nothing_is_harmless(engine: RunningEngine):
    async def body(router, control):
        await control.abort("nobody")
        await control.abort(None)
        return await router.generate(long_request([1], num_tokens=3))

    assert len(engine.run(body).output_ids) == 3


def test_pausing_by_abort_ends_what_runs_and_holds_what_comes(engine: RunningEngine, base: ReferenceModel):
    prompt = [20, 21]

    async def body(router, control):
        async with generating(router, long_request(prompt)) as tasks:
            await control.pause("abort")
            partial = await tasks[0]
            await control.flush_cache(timeout_s=5.0)
            held = asyncio.create_task(router.generate(long_request(prompt, num_tokens=4)))
            await asyncio.sleep(0.4)
            assert not held.done()
            await control.flush_cache(timeout_s=5.0)  # what is held does not count as work
            await control.resume()
            return partial, await held

    partial, held = engine.run(body)
    assert_is_partial(partial, base, prompt)
    assert (held.finish_reason, len(held.output_ids)) == (FinishReason.LENGTH, 4)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_pausing_freezes_what_runs_and_it_goes_on_afterwards(engine: RunningEngine, base: ReferenceModel, mode: str):
    prompts = [[30, 31], [32, 33]]

    async def body(router, control):
        async with generating(router, *(long_request(prompt, num_tokens=200) for prompt in prompts)) as tasks:
            await control.pause(mode)
            await asyncio.sleep(0.5)
            assert not any(task.done() for task in tasks)
            with pytest.raises(EngineError, match="/flush_cache"):
                await control.flush_cache(timeout_s=0.3)
            await control.resume()
            return await asyncio.gather(*tasks)

    for prompt, answer in zip(prompts, engine.run(body), strict=True):
        assert (answer.finish_reason, len(answer.output_ids)) == (FinishReason.LENGTH, 200)
        expected = base.logprobs(prompt, answer.output_ids)
        torch.testing.assert_close(torch.tensor(answer.logprobs), torch.tensor(expected), atol=1e-4, rtol=0)


def test_a_flush_waits_until_the_engine_is_idle(engine: RunningEngine):
    async def body(router, control):
        async with generating(router, long_request([40], num_tokens=150)) as tasks:
            with pytest.raises(EngineError, match="/flush_cache"):
                await control.flush_cache(timeout_s=0.0)
            await control.flush_cache(timeout_s=30.0)
            load = await control.load()
            return await tasks[0], load

    answer, load = engine.run(body)
    assert len(answer.output_ids) == 150
    assert load.is_idle


def test_load_counts_what_runs(engine: RunningEngine):
    async def body(router, control):
        async with generating(router, *(long_request([50 + index]) for index in range(3))):

            async def sees_three() -> bool:
                load = await control.load()
                return load.num_running + load.num_waiting == 3

            await eventually(sees_three)
            await control.abort(None)

        async def sees_none() -> bool:
            return (await control.load()).is_idle

        await eventually(sees_none)

    engine.run(body)


def test_a_client_that_leaves_takes_its_request_along(engine: RunningEngine):
    async def body(router, control):
        async with generating(router, long_request([60]), long_request([61])):
            pass  # leaving cancels both

        async def is_idle() -> bool:
            return (await control.load()).is_idle

        await eventually(is_idle)

    engine.run(body)


def test_sleep_frees_and_wake_gives_a_working_engine_after_an_update(engine: RunningEngine, base: ReferenceModel):
    prompt = [70, 71, 72]

    async def body(router, control):
        await router.generate(long_request(prompt, num_tokens=4))
        await control.flush_cache()
        await control.release_memory(["kv_cache", "cuda_graph", "weights"])
        assert await control.is_alive()
        assert (await control.model_info()).weight_version == FIRST_VERSION
        await control.resume_memory(["weights"])
        await control.update_from_disk(path=str(base.folder), version=FIRST_VERSION + 1)
        await control.resume_memory(["kv_cache", "cuda_graph"])
        await control.flush_cache()
        return await router.generate(long_request(prompt, num_tokens=20))

    answer = engine.run(body)
    assert answer.weight_version == FIRST_VERSION + 1
    expected = base.logprobs(prompt, answer.output_ids)
    torch.testing.assert_close(torch.tensor(answer.logprobs), torch.tensor(expected), atol=1e-4, rtol=0)


def test_sleep_gives_the_cache_back_and_refuses_to_generate(embedded: RunningEngine):
    async def cache_bytes(control) -> int:
        info = await control.server_info()
        return info["internal_states"][0]["kv_cache_bytes"]

    async def body(router, control):
        await router.generate(long_request([1], num_tokens=4))
        assert await cache_bytes(control) > 0
        await control.release_memory(["kv_cache", "weights"])
        assert await cache_bytes(control) == 0
        with pytest.raises(EngineError, match=r"503.*sleeps"):
            await router.generate(long_request([1], num_tokens=4))
        with pytest.raises(EngineError, match="released already"):
            await control.release_memory(["weights"])
        await control.resume_memory(["kv_cache", "weights"])
        with pytest.raises(EngineError, match=r"503.*hold nothing"):
            await router.generate(long_request([1], num_tokens=4))
        with pytest.raises(EngineError, match="not released"):
            await control.resume_memory(["weights"])

    embedded.run(body)


def test_a_busy_engine_does_not_fall_asleep(embedded: RunningEngine):
    async def body(router, control):
        async with generating(router, long_request([1], num_tokens=100)) as tasks:
            with pytest.raises(EngineError, match="idle"):
                await control.release_memory(["kv_cache"])
            return await tasks[0]

    assert len(embedded.run(body).output_ids) == 100


def test_the_engine_tells_what_it_serves(engine: RunningEngine):
    async def body(_, control):
        return await control.is_alive(), await control.model_info(), await control.server_info()

    is_alive, model, server = engine.run(body)
    assert is_alive
    assert (model.model_path, model.weight_version) == (str(engine.folder), FIRST_VERSION)
    assert server["model_path"] == str(engine.folder)
    assert server["tp_size"] == 1


def test_health_is_about_the_process_and_runs_nothing(engine: RunningEngine):
    async def body(_, control):
        await control.pause("retract")
        async with aiohttp.ClientSession() as session, session.get(f"{engine.url}/health") as response:
            assert response.status == 200
        await control.resume()
        async with aiohttp.ClientSession() as session, session.get(f"{engine.url}/health_generate") as response:
            return response.status

    assert engine.run(body) == 200


def test_the_router_knows_its_worker(engine: RunningEngine):
    async def body(router, _):
        assert await router.workers() == [engine.url]
        await router.remove_worker(engine.url)
        await router.wait_for_workers([], timeout_s=20.0)
        with pytest.raises(EngineError, match="not registered"):
            await router.remove_worker(engine.url)
        await router.add_worker(engine.url)
        await router.wait_for_workers([engine.url], timeout_s=20.0)
        return await router.generate(long_request([1], num_tokens=2))

    assert len(engine.run(body).output_ids) == 2
