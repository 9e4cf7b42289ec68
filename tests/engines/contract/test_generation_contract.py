"""What every engine promises about generation, through the real router."""

import asyncio
import itertools

import pytest
import torch
from engine_process import FIRST_VERSION, RunningEngine
from reference_model import ReferenceModel
from tiny_model import SPECIAL

from rlkit.types.generation import FinishReason, GenerateRequest, Generation, SamplingParams

NAMES = itertools.count()


def make_request(prompt: list[int], *, seed: int = 0, return_logprob: bool = True, **sampling) -> GenerateRequest:
    return GenerateRequest(
        rid=f"request-{next(NAMES)}.",
        input_ids=prompt,
        sampling=SamplingParams(**sampling),
        seed=seed,
        return_logprob=return_logprob,
    )


def generate(engine: RunningEngine, *requests: GenerateRequest) -> list[Generation]:
    """All at once, through the router."""

    async def body(router, _):
        return list(await asyncio.gather(*(router.generate(request) for request in requests)))

    return engine.run(body)


def assert_scores(
    generation: Generation, model: ReferenceModel, prompt: list[int], *, temperature: float = 1.0
) -> None:
    expected = model.logprobs(prompt, generation.output_ids, temperature=temperature)
    torch.testing.assert_close(torch.tensor(generation.logprobs), torch.tensor(expected), atol=1e-4, rtol=0)


def test_an_answer_is_complete(engine: RunningEngine, base: ReferenceModel):
    request = make_request([1, 2, 3, 4], max_new_tokens=5, ignore_eos=True)
    [answer] = generate(engine, request)
    assert answer.rid == request.rid
    assert len(answer.output_ids) == len(answer.logprobs) == 5
    assert answer.text == base.tokenizer.decode(answer.output_ids)
    assert answer.finish_reason is FinishReason.LENGTH
    assert answer.weight_version == FIRST_VERSION
    assert answer.prompt_tokens == 4
    assert answer.latency_s > 0


def test_no_logprobs_unless_asked(engine: RunningEngine):
    [answer] = generate(engine, make_request([1, 2], max_new_tokens=3, return_logprob=False, ignore_eos=True))
    assert len(answer.output_ids) == 3
    assert answer.logprobs == []


def test_greedy_is_the_argmax_and_its_logprobs_are_at_temperature_one(engine: RunningEngine, base: ReferenceModel):
    prompt = [5, 6, 7]
    [answer] = generate(engine, make_request(prompt, temperature=0.0, max_new_tokens=12, ignore_eos=True))
    assert answer.output_ids == base.greedy(prompt, 12)
    assert_scores(answer, base, prompt)


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.6}, {"temperature": 1.5}, {"top_p": 0.5}, {"top_k": 3, "temperature": 0.8}, {"min_p": 0.3}],
    ids=str,
)
def test_logprobs_are_over_the_whole_vocabulary_at_the_sampling_temperature(
    engine: RunningEngine, base: ReferenceModel, sampling: dict
):
    prompt = [9, 8, 7, 6, 5]
    [answer] = generate(engine, make_request(prompt, max_new_tokens=24, ignore_eos=True, **sampling))
    assert_scores(answer, base, prompt, temperature=sampling.get("temperature", 1.0))


def test_mixed_traffic_is_scored_as_if_each_request_were_alone(engine: RunningEngine, base: ReferenceModel):
    """Groups with one prompt, prompts of many lengths, and responses that end at different times."""
    generator = torch.Generator().manual_seed(3)
    requests = []
    for group in range(8):
        prompt = torch.randint(0, 256, (1 + 13 * group,), generator=generator).tolist()
        for index in range(4):
            sampling = {"temperature": 0.5 + 0.25 * index, "max_new_tokens": 3 + 7 * index + group}
            requests.append(make_request(prompt, seed=100 * group + index, ignore_eos=True, **sampling))
    answers = generate(engine, *requests)
    for request, answer in zip(requests, answers, strict=True):
        assert len(answer.output_ids) == request.sampling.max_new_tokens
        assert_scores(answer, base, request.input_ids, temperature=request.sampling.temperature)
    drawn = {tuple(answer.output_ids[:3]) for answer in answers}
    assert len(drawn) > len(answers) // 2, "samples of a group must differ"


@pytest.mark.parametrize("sampling", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=str)
def test_each_filter_at_its_strictest_leaves_the_argmax(engine: RunningEngine, base: ReferenceModel, sampling: dict):
    prompt = [20, 21]
    [answer] = generate(engine, make_request(prompt, max_new_tokens=8, ignore_eos=True, **sampling))
    assert answer.output_ids == base.greedy(prompt, 8)


def test_a_stop_id_ends_the_response_and_stays_in_the_ids(engine: RunningEngine, base: ReferenceModel):
    prompt = [30, 31, 32]
    greedy = base.greedy(prompt, 10)
    stop = next(token for token in greedy[3:] if token not in greedy[:3])
    expected = greedy[: greedy.index(stop) + 1]
    [answer] = generate(engine, make_request(prompt, temperature=0.0, max_new_tokens=10, stop_token_ids=(stop,)))
    assert answer.output_ids == expected
    assert answer.finish_reason is FinishReason.STOP
    assert answer.text == base.tokenizer.decode(expected[:-1])
    assert len(answer.logprobs) == len(expected)


def test_the_end_of_sequence_ends_the_response_unless_ignored(engine: RunningEngine, base: ReferenceModel):
    prompt, end = base.prompt_that_ends, base.tokenizer.eos_token_id
    stopped, ignored = generate(
        engine,
        make_request(prompt, temperature=0.0, max_new_tokens=4),
        make_request(prompt, temperature=0.0, max_new_tokens=4, ignore_eos=True, stop_token_ids=(end,)),
    )
    assert (stopped.output_ids, stopped.text, stopped.finish_reason) == ([end], "", FinishReason.STOP)
    assert ignored.output_ids == base.greedy(prompt, 4)  # stop ids are ignored with it
    assert ignored.finish_reason is FinishReason.LENGTH


def test_the_length_limit_counts_before_a_stop_id(engine: RunningEngine, base: ReferenceModel):
    [answer] = generate(engine, make_request(base.prompt_that_ends, temperature=0.0, max_new_tokens=1))
    assert answer.finish_reason is FinishReason.LENGTH


def test_min_new_tokens_masks_the_end_before_the_softmax(engine: RunningEngine, base: ReferenceModel):
    prompt, end = base.prompt_that_ends, base.tokenizer.eos_token_id
    sampling = {"temperature": 0.0, "max_new_tokens": 6, "stop_token_ids": (end,)}
    [answer] = generate(engine, make_request(prompt, min_new_tokens=3, **sampling))
    assert len(answer.output_ids) >= 3
    logits = base.logits([*prompt, *answer.output_ids])[len(prompt) - 1 : -1]
    logits[:3, end] = -torch.inf
    assert answer.output_ids == logits.argmax(-1).tolist()
    expected = logits.log_softmax(-1).gather(1, torch.tensor(answer.output_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(answer.logprobs), expected, atol=1e-4, rtol=0)


def test_a_stop_string_is_cut_from_the_text_and_not_from_the_ids(engine: RunningEngine, base: ReferenceModel):
    stops = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"  # no special token contains them
    prompt = base.tokenizer.encode("the one")
    plain = make_request(prompt, seed=4, temperature=0.0, max_new_tokens=300, ignore_eos=True)
    [unstopped] = generate(engine, plain)
    stop = next(char for char in unstopped.text if char in stops)
    stopping = make_request(
        prompt, seed=4, temperature=0.0, max_new_tokens=300, ignore_eos=True, stop=("nothing", stop)
    )
    [answer] = generate(engine, stopping)
    assert answer.finish_reason is FinishReason.STOP
    assert answer.text == unstopped.text.partition(stop)[0]
    assert answer.output_ids == unstopped.output_ids[: len(answer.output_ids)]
    assert base.tokenizer.decode(answer.output_ids) == answer.text + stop


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_are_left_out_of_the_text_where_asked(engine: RunningEngine, base: ReferenceModel, skip: bool):
    special = base.tokenizer.convert_tokens_to_ids(SPECIAL)
    request = make_request(
        [40, 41], temperature=2.0, max_new_tokens=400, ignore_eos=True, skip_special_tokens=skip, seed=6
    )
    [answer] = generate(engine, request)
    assert answer.text == base.tokenizer.decode(answer.output_ids, skip_special_tokens=skip)
    if special in answer.output_ids:
        assert (SPECIAL in answer.text) is not skip


def test_one_token_prompts_and_one_token_answers(engine: RunningEngine, base: ReferenceModel):
    requests = [make_request([token], max_new_tokens=1, ignore_eos=True) for token in range(12)]
    for request, answer in zip(requests, generate(engine, *requests), strict=True):
        assert_scores(answer, base, request.input_ids)


def test_a_response_may_fill_the_context(engine: RunningEngine, base: ReferenceModel):
    prompt = [3] * 450
    [answer] = generate(engine, make_request(prompt, max_new_tokens=60, ignore_eos=True))
    assert len(answer.output_ids) == 60
    assert_scores(answer, base, prompt)


def test_a_stream_grows_to_the_answer(engine: RunningEngine, base: ReferenceModel):
    prompt = base.tokenizer.encode("on the")
    sampling = {"temperature": 0.0, "max_new_tokens": 20, "ignore_eos": True}

    async def body(router, _):
        return [part async for part in router.stream(make_request(prompt, **sampling))]

    parts = engine.run(body)
    assert len(parts) > 1
    assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [FinishReason.LENGTH]
    for before, after in itertools.pairwise(parts):
        assert after.output_ids[: len(before.output_ids)] == before.output_ids
        assert len(after.output_ids) >= len(before.output_ids)
        assert len(after.logprobs) == len(after.output_ids)
    [whole] = generate(engine, make_request(prompt, **sampling))
    assert (parts[-1].output_ids, parts[-1].text) == (whole.output_ids, whole.text)
    assert_scores(parts[-1], base, prompt)


def test_the_seed_alone_decides_the_tokens(embedded: RunningEngine):
    prompt = [50, 51, 52]

    def request(seed: int) -> GenerateRequest:
        return make_request(prompt, seed=seed, max_new_tokens=20, ignore_eos=True)

    [alone] = generate(embedded, request(2**62 + 1))
    crowd = generate(embedded, *(request(2**62 + offset) for offset in range(20)))
    assert crowd[1].output_ids == alone.output_ids
    assert len({tuple(answer.output_ids) for answer in crowd}) == 20


def test_a_continued_response_goes_on_as_if_it_had_not_been_stopped(embedded: RunningEngine):
    prompt = [60, 61]
    [whole] = generate(embedded, make_request(prompt, seed=5, max_new_tokens=30, ignore_eos=True))
    rest_prompt = prompt + whole.output_ids[:11]
    [rest] = generate(embedded, make_request(rest_prompt, seed=5, max_new_tokens=19, ignore_eos=True))
    assert rest.output_ids == whole.output_ids[11:]


def test_a_group_computes_its_prompt_once(embedded: RunningEngine):
    prompt = [70, 71, 72, 73]
    requests = [make_request(prompt, seed=seed, max_new_tokens=30, ignore_eos=True) for seed in range(8)]
    cached = sorted(answer.cached_tokens for answer in generate(embedded, *requests))
    assert cached[0] == 0 and cached[-1] == 4
    assert sum(cached) >= 4 * 4  # how many arrive while the first still runs is a matter of time
