"""One generation request inside the embedded engine, from admission to its last token.

Made by `protocol.py`, owned by the engine thread until it is finished. No torch here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlkit.engines.embedded.detokenize import IncrementalText, StopStringFinder
from rlkit.types.generation import SamplingParams

NO_INPUT_LOGPROBS = -1

FinishDict = dict[str, Any]
"""SGLang's `finish_reason` as it goes into the answer."""


@dataclass(kw_only=True, slots=True, eq=False)
class EngineRequest:
    """Compared by identity: two requests may be equal in every field."""

    rid: str
    prompt: list[int]
    sampling: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    """Ids that end the response: stop and end-of-sequence ids; empty with `ignore_eos`, as in SGLang."""
    suppressed_ids: list[int]
    """Ids that cannot be sampled before `min_new_tokens`."""
    text: IncrementalText
    finder: StopStringFinder | None
    return_logprob: bool
    logprob_start: int
    """First prompt position whose log-prob is asked for, or NO_INPUT_LOGPROBS."""
    stream: bool
    no_stop_trim: bool
    arrival_s: float
    """`time.perf_counter()` when it came in."""

    output_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    input_logprobs: list[float] = field(default_factory=list[float])
    """Of prompt[logprob_start + 1:]."""
    finish: FinishDict | None = None
    slot: int = -1
    """Cache slot; -1 while it waits."""
    num_computed: int = 0
    """Tokens whose keys and values are in the slot."""
    cached_tokens: int = 0
    """Prompt tokens copied from a sequence with the same prompt."""
    num_retractions: int = 0
    latency_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output_ids)

    @property
    def wants_input_logprobs(self) -> bool:
        """Whether log-probs of the prompt are still to be computed."""
        return self.logprob_start != NO_INPUT_LOGPROBS and not self.output_ids

    def tokens(self) -> list[int]:
        return self.prompt + self.output_ids

    def matches(self, rid: str) -> bool:
        """Whether an abort of `rid` means this request: SGLang compares prefixes."""
        return self.rid.startswith(rid)

    def check_finished(self) -> None:
        """Set `finish` if the newest token ends the response. In SGLang's order: length, stop strings, stop ids."""
        if len(self.output_ids) >= self.sampling.max_new_tokens:
            self.finish = {"type": "length", "length": self.sampling.max_new_tokens}
            return
        stop_string = None if self.finder is None else self.finder.find(self.output_ids)
        if stop_string is not None:
            self.finish = {"type": "stop", "matched": stop_string}
        elif self.output_ids[-1] in self.stop_ids:
            self.finish = {"type": "stop", "matched": self.output_ids[-1]}

    def text_so_far(self) -> str:
        """Response text; once finished without the stop string or stop token that ended it."""
        matched = None if self.finish is None else self.finish.get("matched")
        ids: Sequence[int] = self.output_ids
        if isinstance(matched, int) and not self.no_stop_trim:
            ids = ids[:-1]
        text = self.text.read(ids, is_final=self.finish is not None)
        if not isinstance(matched, str):
            return text
        before, _, _ = text.partition(matched)
        return text[: len(before) + len(matched)] if self.no_stop_trim else before


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """News of one request: its text so far, how many tokens that is, and the weight version that made the last."""

    request: EngineRequest
    text: str
    num_output: int
    weight_version: str
    finish: FinishDict | None
    """The request's at that moment: by the time this is read it may have ended."""

    @property
    def is_final(self) -> bool:
        return self.finish is not None


def aborted(message: str = "Aborted", status_code: int | None = None) -> FinishDict:
    """A status code turns the answer into an HTTP error."""
    return {"type": "abort", "message": message, "status_code": status_code, "err_type": None}
