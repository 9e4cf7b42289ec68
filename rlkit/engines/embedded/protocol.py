"""SGLang's `/generate`: bodies in, answers out. Refusals have SGLang's wording where it matters and its shape always.

No I/O and no torch; `app.py` calls this on the event loop.
"""

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from rlkit.engines.embedded.detokenize import IncrementalText, StopStringFinder
from rlkit.engines.embedded.request import NO_INPUT_LOGPROBS, EngineRequest, Output
from rlkit.engines.embedded.sampling import uniform_numbers
from rlkit.types.errors import EngineError
from rlkit.types.generation import CONTEXT_RESERVE, SamplingParams

DEFAULT_MAX_NEW_TOKENS = 128
RESERVED_FOR_OUTPUT = 2
"""Positions at the end of the context that a response never fills."""

WITHOUT_EFFECT = frozenset(
    {
        "model",
        "log_metrics",
        "no_logs",
        "background",
        "priority",
        "extra_key",
        "routing_key",
        "conversation_id",
        "session_id",
        "custom_labels",
        "return_bytes",
        "data_parallel_rank",
        "routed_dp_rank",
        "received_time",
        "http_worker_ipc",
    }
)
"""SGLang fields that change nothing in an answer of a single text model."""
SAMPLING_WITHOUT_EFFECT = frozenset({"spaces_between_special_tokens", "stream_interval", "custom_params"})
NEUTRAL_SAMPLING = {"n": 1, "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
"""Parameters that only their neutral value is taken of: log-probs of a penalised distribution cannot be trained on."""


class Refusal(EngineError):
    """The request cannot be served as asked; becomes a 400."""


class _Fields:
    """A JSON object whose fields are taken one by one; what is left over was not understood."""

    def __init__(self, body: object, where: str) -> None:
        if not isinstance(body, dict):
            raise Refusal(f"{where} must be a JSON object, got {type(body).__name__}")
        # null stands for the default, as in SGLang
        self._left = {name: value for name, value in body.items() if value is not None}
        self._where = where

    def take(self, name: str, kind: type | tuple[type, ...], default: Any) -> Any:
        value = self._left.pop(name, default)
        kinds = kind if isinstance(kind, tuple) else (kind,)
        is_bool_as_number = isinstance(value, bool) and bool not in kinds
        if value is not default and (not isinstance(value, kinds) or is_bool_as_number):
            raise Refusal(f"{name} has the wrong type: {value!r}")
        return value

    def number(self, name: str, default: float) -> float:
        return float(self.take(name, (int, float), default))

    def strings(self, name: str) -> tuple[str, ...]:
        value = self.take(name, (str, list), [])
        values = [value] if isinstance(value, str) else value
        if not all(isinstance(item, str) for item in values):
            raise Refusal(f"{name} must be a string or a list of strings, got {value!r}")
        return tuple(values)

    def ids(self, name: str) -> list[int] | None:
        value = self.take(name, list, None)
        if value is not None and not all(type(item) is int for item in value):
            raise Refusal(f"{name} must be a flat list of token ids; one request holds one prompt")
        return value

    def finish(self, without_effect: frozenset[str]) -> None:
        """Refuse what is set, has an effect and is not known."""
        unknown = [
            name
            for name, value in self._left.items()
            if name not in without_effect and value not in (False, 0, "", [], {})
        ]
        if unknown:
            raise Refusal(f"{self._where}: the embedded engine does not support {', '.join(sorted(unknown))}")


@dataclass(kw_only=True, slots=True)
class RequestReader:
    """Checks bodies against one model and turns them into engine requests."""

    tokenizer: PreTrainedTokenizerBase
    eos_ids: frozenset[int]
    vocab_size: int
    context_length: int
    seed: int
    """Of requests that bring none."""
    _count: Callable[[], int] = field(default_factory=lambda: itertools.count().__next__)

    def read(self, body: object) -> EngineRequest:
        """The request in a `/generate` body, or Refusal."""
        number = self._count()
        fields = _Fields(body, "request")
        rid = fields.take("rid", str, f"embedded-{number}")
        prompt = self._prompt(fields)
        params, extra = self._sampling(fields.take("sampling_params", dict, {}), number)
        params = self._fit(len(prompt), params)
        return_logprob = fields.take("return_logprob", bool, False)
        start = fields.take("logprob_start_len", int, NO_INPUT_LOGPROBS)
        if not NO_INPUT_LOGPROBS <= start <= len(prompt):
            raise Refusal(f"logprob_start_len must be -1 or at most the {len(prompt)} input tokens, got {start}")
        if not return_logprob or start == len(prompt):
            start = NO_INPUT_LOGPROBS
        stream = fields.take("stream", bool, False)
        fields.finish(WITHOUT_EFFECT)
        stop_ids = self.eos_ids | set(params.stop_token_ids)
        return EngineRequest(
            rid=rid,
            prompt=prompt,
            sampling=params,
            seed=extra["sampling_seed"],
            stop_ids=frozenset() if params.ignore_eos else stop_ids,
            suppressed_ids=[token for token in stop_ids if token < self.vocab_size] if params.min_new_tokens else [],
            text=IncrementalText(self.tokenizer, prompt, skip_special_tokens=params.skip_special_tokens),
            finder=StopStringFinder(self.tokenizer, prompt, params.stop) if params.stop else None,
            return_logprob=return_logprob,
            logprob_start=start,
            stream=stream,
            no_stop_trim=extra["no_stop_trim"],
            arrival_s=time.perf_counter(),
        )

    def _prompt(self, fields: _Fields) -> list[int]:
        text, ids = fields.take("text", str, None), fields.ids("input_ids")
        if (text is None) == (ids is None):
            raise Refusal("Either text or input_ids should be provided, and not both.")
        if ids is None:
            ids = list(self.tokenizer.encode(text))
        if not ids:
            raise Refusal("input_ids cannot be empty.")
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            wrong = next(token for token in ids if not 0 <= token < self.vocab_size)
            raise Refusal(f"The input_ids contain {wrong}; the vocabulary has {self.vocab_size} tokens")
        return ids

    def _sampling(self, body: dict[str, Any], number: int) -> tuple[SamplingParams, dict[str, Any]]:
        fields = _Fields(body, "sampling_params")
        for name, neutral in NEUTRAL_SAMPLING.items():
            if (value := fields.number(name, neutral)) != neutral:
                raise Refusal(f"the embedded engine supports {name} = {neutral} only, got {value}")
        params = SamplingParams(
            temperature=fields.number("temperature", 1.0),
            top_p=fields.number("top_p", 1.0),
            top_k=fields.take("top_k", int, -1),
            min_p=fields.number("min_p", 0.0),
            max_new_tokens=fields.take("max_new_tokens", int, DEFAULT_MAX_NEW_TOKENS),
            min_new_tokens=fields.take("min_new_tokens", int, 0),
            stop=tuple(text for text in fields.strings("stop") if text),
            stop_token_ids=tuple(fields.ids("stop_token_ids") or ()),
            ignore_eos=fields.take("ignore_eos", bool, False),
            skip_special_tokens=fields.take("skip_special_tokens", bool, True),
        )
        extra = {
            "sampling_seed": fields.take("sampling_seed", int, None),
            "no_stop_trim": fields.take("no_stop_trim", bool, False),
        }
        if extra["sampling_seed"] is None:
            extra["sampling_seed"] = int(uniform_numbers([self.seed], [number])[0] * 2**53)
        fields.finish(SAMPLING_WITHOUT_EFFECT)
        _check_sampling(params)
        return params, extra

    def _fit(self, num_prompt: int, params: SamplingParams) -> SamplingParams:
        """Refuse what does not fit into the context, with SGLang's limits; it also keeps the last positions free."""
        limit = self.context_length
        total = num_prompt + params.max_new_tokens
        if num_prompt >= limit:
            raise Refusal(
                f"The input ({num_prompt} tokens) is longer than the model's context length ({limit} tokens)."
            )
        if total > limit:
            raise Refusal(
                f"Requested token count exceeds the model's maximum context length of {limit} tokens. You requested a "
                f"total of {total} tokens: {num_prompt} tokens from the input messages and {params.max_new_tokens} "
                "tokens for the completion."
            )
        if num_prompt >= limit - CONTEXT_RESERVE:
            raise Refusal(
                f"Input length ({num_prompt} tokens) exceeds the maximum allowed length "
                f"({limit - CONTEXT_RESERVE} tokens)."
            )
        room = limit - RESERVED_FOR_OUTPUT - num_prompt
        return replace(
            params,
            max_new_tokens=min(params.max_new_tokens, room),
            min_new_tokens=min(params.min_new_tokens, room),
        )


def _check_sampling(params: SamplingParams) -> None:
    """SGLang's ranges."""
    checks: Mapping[str, tuple[bool, object]] = {
        "temperature must be a non-negative finite number": (
            0.0 <= params.temperature < float("inf"),
            params.temperature,
        ),
        "top_p must be in (0, 1]": (0.0 < params.top_p <= 1.0, params.top_p),
        "min_p must be in [0, 1]": (0.0 <= params.min_p <= 1.0, params.min_p),
        "top_k must be -1 (disable) or at least 1": (params.top_k == -1 or params.top_k >= 1, params.top_k),
        "max_new_tokens must be at least 0": (params.max_new_tokens >= 0, params.max_new_tokens),
        f"min_new_tokens must be in [0, max_new_tokens({params.max_new_tokens})]": (
            0 <= params.min_new_tokens <= params.max_new_tokens,
            params.min_new_tokens,
        ),
    }
    for rule, (holds, value) in checks.items():
        if not holds:
            raise Refusal(f"{rule}, got {value}.")


def answer(output: Output) -> dict[str, Any]:
    """The `/generate` answer, or one event of a stream: always everything so far."""
    request = output.request
    output_ids = request.output_ids[: output.num_output]
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": output.finish,
        "prompt_tokens": len(request.prompt),
        "weight_version": output.weight_version,
        "num_retractions": request.num_retractions,
        "reasoning_tokens": 0,
        "completion_tokens": len(output_ids),
        "cached_tokens": request.cached_tokens,
    }
    if request.return_logprob:
        logprobs = request.logprobs[: output.num_output]
        meta["output_token_logprobs"] = [
            (logprob, token, None) for logprob, token in zip(logprobs, output_ids, strict=True)
        ]
        meta["output_token_logprobs_length"] = len(logprobs)
        meta["input_token_logprobs"] = _input_token_logprobs(request)
    if output.is_final:
        meta["e2e_latency"] = request.latency_s
    return {"text": output.text, "output_ids": output_ids, "meta_info": meta}


def _input_token_logprobs(request: EngineRequest) -> list[tuple[float | None, int, None]]:
    """Of the prompt from `logprob_start` on, as far as computed; the first one has none, as in SGLang."""
    if request.logprob_start == NO_INPUT_LOGPROBS:
        return []
    scored = request.prompt[request.logprob_start :]
    return [(logprob, token, None) for logprob, token in zip([None, *request.input_logprobs], scored, strict=False)]


def is_stream(body: object) -> bool:
    """Whether the answer, also a refusal, is to be a stream of events."""
    return isinstance(body, dict) and body.get("stream") is True


def refusal_event(message: str) -> dict[str, Any]:
    """A refusal inside a stream, which has status 200."""
    return {"error": {"message": message, "type": "invalid_request_error", "code": 400, "retryable": False}}
