import json

import pytest

from rlkit.engines.wire import (
    generate_body,
    parse_generation,
    parse_load,
    parse_model_info,
    parse_stream_event,
    parse_weight_version,
    weight_version_text,
)
from rlkit.types.errors import EngineError
from rlkit.types.generation import FinishReason, GenerateRequest, SamplingParams

REQUEST = GenerateRequest(rid="r", input_ids=[1, 2, 3], sampling=SamplingParams(), seed=9)


def make_answer(**meta) -> dict:
    base = {
        "id": "r",
        "finish_reason": {"type": "length", "length": 2},
        "weight_version": "4",
        "output_token_logprobs": [[-1.5, 7, None], [-0.25, 8, None]],
        "prompt_tokens": 3,
    }
    return {"text": "ab", "output_ids": [7, 8], "meta_info": base | meta}


def test_every_sampling_field_is_sent_whatever_its_value():
    body = generate_body(REQUEST, stream=False)
    renamed = {"seed": "sampling_seed"}
    sent = {renamed.get(name, name) for name in SamplingParams.__dataclass_fields__} | {"sampling_seed"}
    assert body["sampling_params"].keys() == sent
    assert body["sampling_params"]["sampling_seed"] == 9


def test_an_answer_is_read():
    answer = parse_generation(make_answer(), REQUEST)
    assert answer.output_ids == [7, 8] and answer.logprobs == [-1.5, -0.25]
    assert answer.finish_reason is FinishReason.LENGTH
    assert answer.weight_version == 4


def test_ids_and_logprobs_must_match_in_number():
    with pytest.raises(EngineError, match="2 output ids but 1 log-probs"):
        parse_generation(make_answer(output_token_logprobs=[[-1.5, 7, None]]), REQUEST)


def test_a_request_aborted_in_the_queue_has_less_to_tell():
    meta = {"id": "r", "finish_reason": {"type": "abort", "message": "Abort in waiting queue"}, "weight_version": "4"}
    answer = parse_generation({"text": "", "output_ids": [], "meta_info": meta}, REQUEST)
    assert answer.finish_reason is FinishReason.ABORT
    assert (answer.prompt_tokens, answer.output_ids, answer.logprobs) == (3, [], [])


def test_an_abort_with_a_status_is_a_refusal():
    reason = {"type": "abort", "message": "out of memory", "status_code": 503, "err_type": None}
    with pytest.raises(EngineError, match="status 503: out of memory"):
        parse_generation(make_answer(finish_reason=reason), REQUEST)


def test_the_last_event_of_a_stream_aborted_in_the_queue_keeps_earlier_ids():
    first = parse_stream_event(b"data: " + json.dumps(make_answer(finish_reason=None)).encode(), REQUEST, None)
    assert first.finish_reason is None
    last = make_answer(finish_reason={"type": "abort", "message": "x"})
    last["output_ids"] = [8]
    assert parse_stream_event(b"data: " + json.dumps(last).encode(), REQUEST, first).output_ids == [7, 8]


@pytest.mark.parametrize("text", ["default", "", "1.0", "-1", " 1", "1 ", "+1", "٣", None, 3], ids=repr)
def test_versions_are_decimal_integers_in_a_string(text):
    with pytest.raises(EngineError, match="weight version"):
        parse_weight_version(text)


def test_versions_survive_the_way_there_and_back():
    assert [parse_weight_version(weight_version_text(version)) for version in (0, 7, 10**12)] == [0, 7, 10**12]
    with pytest.raises(EngineError, match="negative"):
        weight_version_text(-1)


def test_the_version_of_an_engine_that_was_given_none_is_refused():
    with pytest.raises(EngineError, match="--weight-version"):
        parse_model_info({"model_path": "/m", "weight_version": "default"})


def test_load_is_summed_over_data_parallel_ranks():
    ranks = [
        {"dp_rank": 0, "num_reqs": 5, "num_waiting_reqs": 2, "num_tokens": 100, "num_pending_tokens": 1},
        {"dp_rank": 1, "num_reqs": 1, "num_waiting_reqs": 0, "num_tokens": 10, "num_pending_tokens": 0},
    ]
    load = parse_load(ranks)
    assert (load.num_running, load.num_waiting, load.details["num_tokens"]) == (4, 2, 110.0)
    assert not load.is_idle
