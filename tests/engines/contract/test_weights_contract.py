"""What every engine promises about weight updates: each way of sending gives the same weights, nothing old survives."""

import asyncio
import base64
import io
import itertools
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from engine_process import FIRST_VERSION, RunningEngine, free_port
from reference_model import ReferenceModel

from rlkit.dist.update_group import join_update_group, leave_update_group
from rlkit.types.errors import EngineError
from rlkit.types.generation import GenerateRequest, Generation, SamplingParams
from rlkit.types.weights import WeightSpec, tensor_checksum

NAMES = itertools.count()
PROMPT = [11, 12, 13, 14, 15, 16]
NEW = FIRST_VERSION + 1
GROUP = "contract"

NamedTensors = Sequence[tuple[str, torch.Tensor]]


def make_request(*, num_tokens: int = 16, prompt: Sequence[int] = PROMPT) -> GenerateRequest:
    sampling = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
    return GenerateRequest(rid=f"weights-{next(NAMES)}.", input_ids=list(prompt), sampling=sampling, seed=3)


def assert_made_by(answer: Generation, model: ReferenceModel, version: int, prompt: Sequence[int] = PROMPT) -> None:
    """Log-probs are the model's, and the version is reported."""
    assert answer.weight_version == version
    expected = model.logprobs(prompt, answer.output_ids)
    torch.testing.assert_close(torch.tensor(answer.logprobs), torch.tensor(expected), atol=1e-4, rtol=0)


class Sender:
    """A trainer's side of `/update_weights_from_tensor`: tensors in shared memory, handles in a pickle."""

    def __init__(self, share: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        self._make_shared = share or (lambda tensor: tensor.clone().share_memory_())
        self._shared: list[torch.Tensor] = []  # must outlive the call

    def bucket(self, named: NamedTensors) -> str:
        flat = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in named])
        metadata, start = [], 0
        for name, tensor in named:
            end = start + tensor.numel() * tensor.itemsize
            metadata.append(
                SimpleNamespace(
                    name=name,
                    shape=tensor.shape,
                    dtype=tensor.dtype,
                    start_idx=start,
                    end_idx=end,
                    numel=end - start,
                )
            )
            start = end
        return self._pickle({"flattened_tensor": self._share(flat), "metadata": metadata})

    def named_list(self, named: NamedTensors) -> str:
        return self._pickle([(name, self._share(tensor)) for name, tensor in named])

    def _share(self, tensor: torch.Tensor) -> torch.Tensor:
        self._shared.append(self._make_shared(tensor))
        return self._shared[-1]

    @staticmethod
    def _pickle(content: object) -> str:
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump(content)
        return base64.b64encode(buffer.getvalue()).decode()


@pytest.fixture(autouse=True)
def shared_by_file():
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    yield
    torch.multiprocessing.set_sharing_strategy(before)


def specs_of(named: NamedTensors) -> list[WeightSpec]:
    return [WeightSpec(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype) for name, tensor in named]


async def by_bucket(control, model: ReferenceModel, version: int) -> None:
    """In three buckets, as a large model travels."""
    named, sender = model.named_tensors(), Sender()
    for part in (named[:7], named[7:20], named[20:]):
        await control.update_from_tensor(payloads=[sender.bucket(part)], version=version)


async def by_named_list(control, model: ReferenceModel, version: int) -> None:
    sender = Sender()
    payload = sender.named_list(model.named_tensors())
    await control.update_from_tensor(payloads=[payload], version=version, load_format=None)


async def by_group(control, model: ReferenceModel, version: int, *, load_format: str | None = None) -> None:
    """As rank 0 of a group of two; the engine is the other."""
    port, named = free_port(), model.named_tensors()
    engine_side = asyncio.create_task(
        control.init_weights_group(
            master_address="127.0.0.1",
            master_port=port,
            rank_offset=1,
            world_size=2,
            group_name=GROUP,
            backend="gloo",
        )
    )
    group = await asyncio.to_thread(
        join_update_group,
        backend="gloo",
        address="127.0.0.1",
        port=port,
        rank=0,
        world_size=2,
        name=GROUP,
        timeout_s=60.0,
    )
    await engine_side
    specs = specs_of(named)
    update = asyncio.create_task(
        control.update_from_distributed(specs=specs, group_name=GROUP, version=version, load_format=load_format)
    )

    def send() -> None:
        if load_format is None:
            for _, tensor in named:
                dist.broadcast(tensor.contiguous(), src=0, group=group)
        else:
            flat = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in named])
            dist.broadcast(flat, src=0, group=group)

    await asyncio.to_thread(send)
    await update
    await control.destroy_weights_group(group_name=GROUP)
    leave_update_group(group)


async def by_group_bucket(control, model: ReferenceModel, version: int) -> None:
    await by_group(control, model, version, load_format="flattened_bucket")


async def by_disk(control, model: ReferenceModel, version: int) -> None:
    await control.update_from_disk(path=str(model.folder), version=version)


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


def test_no_cached_prefix_survives_an_update(engine: RunningEngine, base: ReferenceModel, other: ReferenceModel):
    """A prompt that was computed with old weights, twice, and then again with new ones."""

    async def body(router, control):
        old = [await router.generate(make_request()) for _ in range(2)]
        await control.pause("abort")
        await control.flush_cache()
        await by_bucket(control, other, NEW)
        await control.flush_cache()
        await control.resume()
        return old, await router.generate(make_request())

    old, new = engine.run(body)
    for answer in old:
        assert_made_by(answer, base, FIRST_VERSION)
    assert_made_by(new, other, NEW)
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
        running = asyncio.create_task(router.generate(make_request(num_tokens=150)))
        await asyncio.sleep(0.2)
        update = asyncio.create_task(by_disk(control, other, NEW))
        await asyncio.sleep(0.05)
        late = asyncio.create_task(router.generate(make_request(prompt=[1, 2, 3])))
        return await running, await late, await update

    running, late, _ = engine.run(body)
    assert len(running.output_ids) == 150
    assert_made_by(running, base, FIRST_VERSION)
    assert_made_by(late, other, NEW, prompt=[1, 2, 3])


def test_tied_embeddings_stay_one_matrix(engine: RunningEngine, base: ReferenceModel):
    """Only the input embedding is sent; the output head must follow. Its second name is not a tensor of its own."""
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
