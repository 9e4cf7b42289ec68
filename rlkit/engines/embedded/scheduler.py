"""Which sequences run: a queue, the slots, and prompts that are computed once for all their samples.

Pure Python over `EngineRequest`; `engine.py` carries out what is planned here. Invariants between calls:
(a) `running[i].slot == i`, so the cache has no holes; (b) a request is in `waiting`, in `running`, or finished;
(c) a shared prompt's members all run, and one of them computes it or has computed it.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from rlkit.engines.embedded.request import EngineRequest, aborted

LogitsRow = TypeVar("LogitsRow")

ADMISSION_MARGIN = 64
"""Positions by which sequences may grow after an admission before the token budget can be exceeded."""

SCORED_TOKENS = 512
"""Most prompt tokens whose logits one pass keeps for input log-probs."""


@dataclass(slots=True, eq=False)
class SharedPrompt(Generic[LogitsRow]):
    """Tokens that several running requests start with, computed once."""

    members: list[EngineRequest] = field(default_factory=list[EngineRequest])
    next_logits: LogitsRow | None = None
    """Logits after the last token; None until they are computed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedPiece:
    """Tokens [start, stop) of a request, to be computed in one prefill pass."""

    request: EngineRequest
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        return self.stop == self.request.num_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready(Generic[LogitsRow]):
    """A request whose tokens are all cached once the source's slot has been copied to its own."""

    request: EngineRequest
    source: EngineRequest
    """The request itself where there is nothing to copy."""
    next_logits: LogitsRow


class Scheduler(Generic[LogitsRow]):
    """Decides; touches neither tensors nor threads."""

    def __init__(self, *, max_running: int, max_total_tokens: int, move_slot: Callable[[int, int, int], None]) -> None:
        """`max_total_tokens` bounds slots x longest sequence; a single sequence always runs.
        `move_slot(source, target, length)` copies cache content."""
        self._max_running = max_running
        self._max_total_tokens = max_total_tokens
        self._move_slot = move_slot
        self.waiting: deque[EngineRequest] = deque()
        self.running: list[EngineRequest] = []
        self._shared: dict[tuple[int, ...], SharedPrompt[LogitsRow]] = {}
        self._shared_of: dict[EngineRequest, tuple[int, ...]] = {}
        self._to_prefill: deque[EngineRequest] = deque()

    @property
    def is_idle(self) -> bool:
        return not self.running and not self.waiting

    def add(self, request: EngineRequest) -> None:
        self.waiting.append(request)

    def admit(self) -> "list[Ready[LogitsRow]]":
        """Give slots to waiting requests, first come first served, while slots and the token budget allow.

        Returns those whose tokens another slot holds already; the others are prefilled.
        """
        ready: list[Ready[LogitsRow]] = []
        longest = max((request.num_tokens for request in self.running), default=0)
        while self.waiting and len(self.running) < self._max_running:
            request = self.waiting[0]
            longest = max(longest, request.num_tokens)
            padded = (len(self.running) + 1) * (longest + ADMISSION_MARGIN)
            if self.running and padded > self._max_total_tokens:
                break
            self.waiting.popleft()
            request.slot, request.num_computed = len(self.running), 0
            self.running.append(request)
            if request.wants_input_logprobs:
                self._to_prefill.append(request)  # needs the logits of its own prompt: shares nothing
            else:
                ready += self._share(request)
        return ready

    def _share(self, request: EngineRequest) -> "list[Ready[LogitsRow]]":
        key = tuple(request.tokens())
        shared = self._shared.setdefault(key, SharedPrompt())
        source = next((member for member in shared.members if member.num_computed >= len(key)), None)
        shared.members.append(request)
        self._shared_of[request] = key
        if source is not None and shared.next_logits is not None:
            return [self._copied(request, source, shared.next_logits)]
        if len(shared.members) == 1:
            self._to_prefill.append(request)
        return []

    @staticmethod
    def _copied(request: EngineRequest, source: EngineRequest, logits: LogitsRow) -> "Ready[LogitsRow]":
        request.num_computed = request.num_tokens
        request.cached_tokens = len(request.prompt)
        return Ready(request=request, source=source, next_logits=logits)

    def plan_prefill(self, max_tokens: int) -> list[PlannedPiece]:
        """Pieces for the next pass, at most `max_tokens` in all; the last one may be part of a prompt."""
        pieces: list[PlannedPiece] = []
        for request in self._to_prefill:
            limit = min(max_tokens, SCORED_TOKENS) if request.wants_input_logprobs else max_tokens
            stop = min(request.num_tokens, request.num_computed + limit)
            if stop == request.num_computed:
                break
            pieces.append(PlannedPiece(request=request, start=request.num_computed, stop=stop))
            if request.wants_input_logprobs:
                break
            max_tokens -= stop - request.num_computed
        return pieces

    def finish_piece(self, piece: PlannedPiece, next_logits: Callable[[], LogitsRow]) -> "list[Ready[LogitsRow]]":
        """Record a computed piece. After the last one of a prompt: everyone who can now get a first token, the
        request itself first (its own source)."""
        request = piece.request
        request.num_computed = piece.stop
        if not piece.is_last:
            return []
        self._to_prefill.remove(request)
        logits = next_logits()
        ready = [Ready(request=request, source=request, next_logits=logits)]
        key = self._shared_of.get(request)
        if key is not None:
            shared = self._shared[key]
            shared.next_logits = logits
            ready += [self._copied(other, request, logits) for other in shared.members if other.num_computed == 0]
        return ready

    def keep_within_budget(self) -> None:
        """Send the youngest sequences back to the queue while one more token each would exceed the token budget."""
        longest = max((request.num_tokens for request in self.running), default=0)
        while len(self.running) > 1 and len(self.running) * (longest + 1) > self._max_total_tokens:
            self._retract(self.running[-1])

    def retract_all(self) -> None:
        """Everything that runs goes back to the front of the queue and loses its cache."""
        for request in reversed(list(self.running)):
            self._retract(request)

    def _retract(self, request: EngineRequest) -> None:
        self._release(request)
        request.num_retractions += 1
        if not request.output_ids:
            request.input_logprobs.clear()  # the prompt is computed again from its beginning
        self.waiting.appendleft(request)

    def forget_shared(self) -> None:
        """The weights changed: no later request may copy from what is cached."""
        for shared in self._shared.values():
            followers = [member for member in shared.members if member.num_computed == 0]
            self._to_prefill.extend(member for member in followers if member not in self._to_prefill)
        self._shared.clear()
        self._shared_of.clear()

    def abort(self, is_meant: Callable[[EngineRequest], bool]) -> list[EngineRequest]:
        """End the matching requests; their tokens so far stay. Returns them."""
        queued = [request for request in self.waiting if is_meant(request)]
        for request in queued:
            self.waiting.remove(request)
            request.finish = aborted("Abort in waiting queue")
        active = [request for request in self.running if is_meant(request)]
        for request in active:
            request.finish = aborted()
        self.release_finished(active)
        return queued + active

    def release_finished(self, requests: Iterable[EngineRequest]) -> None:
        """Free the slots of running requests; the last slots move into the holes."""
        # From the top: whatever then moves into a hole is itself a survivor.
        for request in sorted(requests, key=lambda request: -request.slot):
            self._release(request)

    def _release(self, request: EngineRequest) -> None:
        self._leave_shared(request)
        if request in self._to_prefill:
            self._to_prefill.remove(request)
        last = self.running.pop()
        if last is not request:
            self._move_slot(last.slot, request.slot, last.num_computed)
            self.running[request.slot] = last
            last.slot = request.slot
        request.slot, request.num_computed = -1, 0

    def _leave_shared(self, request: EngineRequest) -> None:
        key = self._shared_of.pop(request, None)
        if key is None:
            return
        shared = self._shared[key]
        shared.members.remove(request)
        if not shared.members:
            del self._shared[key]
        elif shared.next_logits is None and request in self._to_prefill:
            self._to_prefill.append(shared.members[0])  # the next member computes the prompt instead
