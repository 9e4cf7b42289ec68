"""A request to an inference engine and its answer, as `engines/client.py` sends and parses them (SGLang's native
`/generate`)."""

from dataclasses import dataclass, field
from enum import StrEnum

CONTEXT_RESERVE = 6
"""Positions at the end of the context in which both engines refuse a prompt to end (SGLang 0.5.17: `Input length ...
exceeds the maximum allowed length`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Sent field by field with every request: an engine's own defaults never decide."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 keeps the whole vocabulary."""
    min_p: float = 0.0
    max_new_tokens: int = 1024
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    """Stop strings; they are cut from the text, never from the output ids."""
    stop_token_ids: tuple[int, ...] = ()
    """Includes the end-of-sequence ids of `generation_config.json`."""
    ignore_eos: bool = False
    skip_special_tokens: bool = False
    repetition_penalty: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    rid: str
    """Unique in the run; `/abort_request` names it."""
    input_ids: list[int]
    sampling: SamplingParams
    seed: int
    """SGLang honours it in deterministic mode only; the embedded engine always."""
    return_logprob: bool = True


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """One answer. `len(logprobs) == len(output_ids)` when log-probs were asked for, else `logprobs` is empty."""

    rid: str
    text: str
    output_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason | None
    """None only on the partial answers of a stream."""
    weight_version: int
    """At the last token."""
    prompt_tokens: int
    cached_tokens: int = 0
    latency_s: float = 0.0
    version_starts: tuple[tuple[int, int], ...] = ()
    """(weight version, index of its first token) of each stretch of `output_ids`, where the answer was followed as it
    grew; empty where only the version at the end is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInfo:
    """The part of `/model_info` that rlkit relies on."""

    model_path: str
    weight_version: int
    """Versions are integers sent as strings; anything else is an EngineError."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLoad:
    """The part of `/get_load` that rlkit relies on, summed over data-parallel ranks."""

    num_running: int
    num_waiting: int
    details: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def is_idle(self) -> bool:
        return self.num_running == 0 and self.num_waiting == 0
