"""Between rlkit's types and the JSON of SGLang's native API: request bodies out, answers in. No I/O.

Used by `client.py`. Raises `EngineError` for answers that mean a refusal, `KeyError`/`TypeError`/`ValueError` for
malformed ones; the client adds the address.
"""

from typing import Any

import orjson

from rlkit.types.errors import EngineError
from rlkit.types.generation import EngineLoad, FinishReason, GenerateRequest, Generation, ModelInfo


def generate_body(request: GenerateRequest, *, stream: bool) -> dict[str, Any]:
    """The `/generate` body. Every sampling field is sent, whatever its value."""
    sampling = request.sampling
    return {
        "rid": request.rid,
        "input_ids": request.input_ids,
        "sampling_params": {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "max_new_tokens": sampling.max_new_tokens,
            "min_new_tokens": sampling.min_new_tokens,
            "stop": list(sampling.stop),
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": sampling.ignore_eos,
            "skip_special_tokens": sampling.skip_special_tokens,
            "repetition_penalty": sampling.repetition_penalty,
            "sampling_seed": request.seed,
        },
        "return_logprob": request.return_logprob,
        "logprob_start_len": -1,
        "stream": stream,
    }


def parse_generation(answer: dict[str, Any], request: GenerateRequest) -> Generation:
    """One `/generate` answer. A request aborted while it waited has only part of `meta_info`."""
    meta = answer["meta_info"]
    reason = _finish_reason(meta["finish_reason"])
    output_ids = list(answer["output_ids"])
    logprobs = [entry[0] for entry in meta.get("output_token_logprobs") or []] if request.return_logprob else []
    if request.return_logprob and len(logprobs) != len(output_ids):
        raise EngineError(f"request {request.rid}: {len(output_ids)} output ids but {len(logprobs)} log-probs")
    return Generation(
        rid=meta["id"],
        text=answer["text"],
        output_ids=output_ids,
        logprobs=logprobs,
        finish_reason=reason,
        weight_version=parse_weight_version(meta["weight_version"]),
        prompt_tokens=meta.get("prompt_tokens", len(request.input_ids)),
        cached_tokens=meta.get("cached_tokens", 0),
        latency_s=meta.get("e2e_latency", 0.0),
    )


def parse_stream_event(line: bytes, request: GenerateRequest, previous: Generation | None) -> Generation:
    """One `data:` line of a streamed answer, as the whole answer so far.

    SGLang ends the stream of a request that it aborts in its queue with the last id only; the ids seen before are
    kept then.
    """
    event = orjson.loads(line.removeprefix(b"data:"))
    if "error" in event:
        raise EngineError(f"request {request.rid}: {event['error'].get('message', event['error'])}")
    if previous is not None and len(event["output_ids"]) < len(previous.output_ids):
        event["output_ids"] = previous.output_ids
    return parse_generation(event, request)


def parse_model_info(answer: dict[str, Any]) -> ModelInfo:
    return ModelInfo(model_path=answer["model_path"], weight_version=parse_weight_version(answer["weight_version"]))


def parse_load(answer: list[dict[str, Any]]) -> EngineLoad:
    """`/get_load`: one entry a data-parallel rank; `num_reqs` counts running and waiting."""
    num_waiting = sum(rank["num_waiting_reqs"] for rank in answer)
    num_requests = sum(rank["num_reqs"] for rank in answer)
    details = {key: float(sum(rank.get(key, 0) for rank in answer)) for key in ("num_tokens", "num_pending_tokens")}
    return EngineLoad(num_running=num_requests - num_waiting, num_waiting=num_waiting, details=details)


def parse_weight_version(text: object) -> int:
    """Versions are non-negative decimal integers in a string; SGLang's own "default" is refused."""
    if not isinstance(text, str) or not text.isdecimal() or not text.isascii():
        raise EngineError(
            f"weight version {text!r} is not a decimal integer; engines are started with --weight-version N and "
            "updated with integers only"
        )
    return int(text)


def weight_version_text(version: int) -> str:
    if version < 0:
        raise EngineError(f"weight version {version} is negative; versions count from 0")
    return str(version)


def _finish_reason(reason: dict[str, Any] | None) -> FinishReason | None:
    """None while a stream goes on. An abort that carries a status code is a refusal by the engine, not an abort that
    was asked for."""
    if reason is None:
        return None
    if "status_code" in reason and reason["status_code"] is not None:
        raise EngineError(f"the engine gave up with status {reason['status_code']}: {reason.get('message', '')}")
    return FinishReason(reason["type"])
