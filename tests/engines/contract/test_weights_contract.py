"""What every engine promises about weight updates: each way of sending gives the same weights, nothing old survives."""

import asyncio
import base64
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.multiprocessing
from engine_process import FIRST_VERSION, RunningEngine, generating
from reference_model import ReferenceModel
from weight_sending import Sender, by_bucket, by_disk, by_group, by_group_bucket, by_named_list, specs_of

from rlkit.types.errors import EngineError
from rlkit.types.generation import GenerateRequest, Generation, SamplingParams
from rlkit.types.weights import tensor_checksum

NAMES = itertools.count()
PROMPT = [11, 12, 13, 14, 15, 16]
NEW = FIRST_VERSION + 1


def make_request(*, num_tokens: int = 16, prompt: Sequence[int] = PROMPT) -> GenerateRequest:
    sampling = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
    return GenerateRequest(rid=f"weights-{next(NAMES)}.", input_ids=list(prompt), sampling=sampling, seed=3)


def assert_made_by(answer: Generation, model: ReferenceModel, version: int, prompt: Sequence[int] = PROMPT) -> None:
    """Log-probs are the model's, and the version is reported."""
    assert answer.weight_version == version
    expected = model.logprobs(prompt, answer.output_ids)
    torch.testing.assert_close(torch.tensor(answer.logprobs), torch.tensor(expected), atol=1e-4, rtol=0)


@pytest.fixture(autouse=True)
def shared_by_file():
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    yield
    torch.multiprocessing.set_sharing_strategy(before)


WAYS = [by_bucket, by_named_list, by_group, by_group_bucket, by_disk]


@pytest.mark.parametrize("send", WAYS)
def test_every_way_of_sending_gives_the_new_weights(
    engine: RunningEngine, base: ReferenceModel, other: ReferenceModel, send
):
    async def body(router, control):
        before = await router.generate(make_request())
        await control.pause("abort")
        await control.flush_cache()
        await send(control, other, NEW)
        await control.flush_cache()
        await control.resume()
        info = await control.model_info()
        return before, await router.generate(make_request()), info.weight_version

    before, after, version = engine.run(body)
    assert_made_by(before, base, FIRST_VERSION)
    assert_made_by(after, other, NEW)
    assert version == NEW


@pytest.mark.gpu
def test_tensors_that_stay_on_the_gpu(embedded: RunningEngine, other: ReferenceModel):
    """CUDA IPC: the engine maps the sender's memory."""
    if embedded.device != "cuda":
        pytest.skip("needs an engine on a GPU")

    async def body(router, control):
        named = [(name, tensor.cuda()) for name, tensor in other.named_tensors()]
        sender = Sender(share=lambda tensor: tensor.clone())
        for part in (named[:7], named[7:]):
            await control.update_from_tensor(payloads=[sender.bucket(part)], version=NEW)
        await control.flush_cache()
        return await router.generate(make_request())

    assert_made_by(embedded.run(body), other, NEW)


def case(name: str) -> dict:
    lines = (Path(__file__).parents[2] / "data" / "cases.jsonl").read_text(encoding="utf-8").split("\n")
    return next(found for line in lines if line for found in [json.loads(line)] if found["id"] == name)


def test_no_cached_prefix_survives_an_update(engine: RunningEngine, base: ReferenceModel, other: ReferenceModel):
    """Case ws-01: a prompt that was computed twice with version 1, then again after an update to version 2."""
    expected = case("ws-01")["expected"]
    assert expected["call_order"] == "pause/abort -> (wait until idle) -> buckets 1..3 -> flush -> resume"

    async def body(router, control):
        await control.set_version(1)
        old = [await router.generate(make_request()) for _ in range(2)]
        async with generating(router, make_request(num_tokens=300)):
            with pytest.raises(EngineError, match="/flush_cache: status 400"):  # busy: said aloud, not skipped
                await control.flush_cache(timeout_s=0.0)
            await control.pause("abort")
            await control.flush_cache()
            await by_bucket(control, other, 2)
            await control.flush_cache()
            await control.resume()
        return old, await router.generate(make_request())

    old, new = engine.run(body)
    for answer in old:
        assert_made_by(answer, base, 1)
    assert_made_by(new, other, expected["weight_version_reported"])
    assert new.cached_tokens == 0


def test_retracted_requests_go_on_with_the_new_weights_alone(
    engine: RunningEngine, base: ReferenceModel, other: ReferenceModel
):
    """Tokens before the update are the old policy's, those after it the new one's, with no old keys in between."""

    async def body(router, control):
        first_seen = asyncio.Event()
        parts: list[Generation] = []

        async def stream() -> None:
            async for part in router.stream(make_request(num_tokens=120)):
                parts.append(part)
                first_seen.set()

        task = asyncio.create_task(stream())
        await first_seen.wait()
        await control.pause("retract")
        await asyncio.sleep(0.3)
        num_old = len(parts[-1].output_ids)
        if engine.kind == "sglang":
            # Its prefix cache is not flushed while something waits; runs that keep requests start it without one.
            await control.abort(None)
            await control.resume()
            await task
            return None
        await by_bucket(control, other, NEW)
        await control.resume()
        await task
        return parts[-1], num_old

    result = engine.run(body)
    if result is None:
        pytest.skip("SGLang keeps the prefix cache of waiting requests unless it is started without one")
    answer, num_old = result
    assert len(answer.output_ids) == 120 and 0 < num_old < 120
    old = base.logprobs(PROMPT, answer.output_ids)[:num_old]
    new = other.logprobs(PROMPT, answer.output_ids)[num_old:]
    torch.testing.assert_close(torch.tensor(answer.logprobs), torch.tensor(old + new), atol=1e-4, rtol=0)
    assert answer.weight_version == NEW


def test_an_update_waits_for_what_runs_and_never_mixes(
    engine: RunningEngine, base: ReferenceModel, other: ReferenceModel
):
    async def body(router, control):
        async with generating(router, make_request(num_tokens=150)) as [running]:
            update = asyncio.create_task(by_disk(control, other, NEW))
            await asyncio.sleep(0.05)
            late = asyncio.create_task(router.generate(make_request(prompt=[1, 2, 3])))
            return await running, await late, await update

    running, late, _ = engine.run(body)
    assert len(running.output_ids) == 150
    assert_made_by(running, base, FIRST_VERSION)
    # Whichever of the two came first: all of an answer is by the version that it reports.
    by = {FIRST_VERSION: base, NEW: other}[late.weight_version]
    assert_made_by(late, by, late.weight_version, prompt=[1, 2, 3])


def test_tied_embeddings_stay_one_matrix(engine: RunningEngine, base: ReferenceModel):
    """Case ws-03 on the engine's side: only the input embedding is sent, and the output head must follow."""
    changed = ReferenceModel(base.folder)
    embedding = changed.model.get_input_embeddings().weight
    with torch.no_grad():
        embedding += torch.randn(embedding.shape, generator=torch.Generator().manual_seed(5)) * 0.05
    assert changed.model.get_output_embeddings().weight is embedding
    named = [("model.embed_tokens.weight", embedding.detach())]

    async def body(router, control):
        sender = Sender()
        await control.update_from_tensor(payloads=[sender.bucket(named)], version=NEW)
        await control.flush_cache()
        return await router.generate(make_request())

    assert_made_by(engine.run(body), changed, NEW)


def test_the_version_can_be_set_alone(engine: RunningEngine, base: ReferenceModel):
    async def body(router, control):
        await control.set_version(41)
        info = await control.model_info()
        return info.weight_version, await router.generate(make_request())

    version, answer = engine.run(body)
    assert version == 41
    assert_made_by(answer, base, 41)


def test_an_update_that_fails_names_the_reason(engine: RunningEngine):
    async def body(_, control):
        with pytest.raises(EngineError, match="/update_weights_from_disk: status 400"):
            await control.update_from_disk(path="/no/such/folder", version=NEW)
        with pytest.raises(EngineError, match=r"/destroy_weights_update_group: status 400.*does not exist"):
            await control.destroy_weights_group(group_name="nobody")
        return (await control.model_info()).weight_version

    assert engine.run(body) == FIRST_VERSION


def test_a_tensor_that_does_not_fit_changes_nothing(embedded: RunningEngine, base: ReferenceModel):
    wrong_shape = ("model.norm.weight", torch.ones(3))
    wrong_name = ("model.nothing.weight", torch.ones(3))
    good = ("model.norm.weight", torch.zeros(64))

    async def body(router, control):
        for wrong, reason in ((wrong_shape, r"shape \[3\], the model's is \[64\]"), (wrong_name, "no tensor")):
            with pytest.raises(EngineError, match=reason):
                await control.update_from_tensor(payloads=[Sender().bucket([good, wrong])], version=NEW)
        with pytest.raises(EngineError, match="not in"):
            await control.update_from_distributed(specs=specs_of([good]), group_name="nobody", version=NEW)
        with pytest.raises(EngineError, match=r"may not contain posix\.system"):
            bomb = base64.b64encode(b"cposix\nsystem\n(S'true'\ntR.").decode()
            await control.update_from_tensor(payloads=[bomb], version=NEW)
        return await router.generate(make_request())

    assert_made_by(embedded.run(body), base, FIRST_VERSION)


def test_checksums_are_those_of_the_weights(embedded: RunningEngine, base: ReferenceModel, other: ReferenceModel):
    async def body(_, control):
        before = await control.weights_checker("checksum")
        await by_bucket(control, other, NEW)
        return before, await control.weights_checker("checksum")

    for answer, model in zip(embedded.run(body), (base, other), strict=True):
        found = answer["ranks"][0]["checksums"]
        assert found == {name: tensor_checksum(tensor) for name, tensor in model.named_tensors()}


def test_the_weights_checker_compares_with_a_snapshot(embedded: RunningEngine, base: ReferenceModel):
    async def body(_, control):
        await control.weights_checker("snapshot")
        await control.weights_checker("reset_tensors")
        with pytest.raises(EngineError, match="equality failed"):
            await control.weights_checker("compare")
        await by_bucket(control, base, FIRST_VERSION)
        await control.weights_checker("compare")

    embedded.run(body)


def test_a_version_that_is_no_integer_is_refused(embedded: RunningEngine):
    async def body(_, control):
        for version in ("default", "1.5", "-1", ""):
            body = {"new_version": version, "abort_all_requests": False}
            with pytest.raises(EngineError, match="not a decimal integer"):
                await control._succeed("/update_weight_version", body)
        return (await control.model_info()).weight_version

    assert embedded.run(body) == FIRST_VERSION


def test_prompts_can_be_scored(engine: RunningEngine, base: ReferenceModel):
    """`logprob_start_len` as in SGLang: from there on, the first without a log-prob, and without temperature."""
    prompt = [(7 * index) % 256 for index in range(80)]

    async def body(_, control):
        return [
            await control._call(
                "POST",
                "/generate",
                {
                    "input_ids": prompt,
                    "return_logprob": True,
                    "logprob_start_len": start,
                    "sampling_params": {"temperature": 0.5, "max_new_tokens": 1},
                },
            )
            for start in (0, 30, -1)
        ]

    expected = base.logprobs(prompt[:1], prompt[1:])
    for start, answer in zip((0, 30, 80), engine.run(body), strict=True):
        scored = answer["meta_info"]["input_token_logprobs"]
        assert [token for _, token, _ in scored] == prompt[start:]
        if scored:
            assert scored[0][0] is None
            values = torch.tensor([logprob for logprob, _, _ in scored[1:]])
            torch.testing.assert_close(values, torch.tensor(expected[start:]), atol=1e-4, rtol=0)
