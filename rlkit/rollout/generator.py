"""From a prompt to a finished response: one `Generator` drives every sample of a run through the router.

Called by `manager.py` and `evaluate.py`. It bounds what is in flight, sends every sampling field, asks for no more
tokens than fit, issues a request again when an engine fails, and aborts without depending on any one engine. Invariants
of a sample that `generate` has returned: its mask and log-probs are as long as its response, and its status is
COMPLETED, TRUNCATED, ABORTED (its tokens so far are kept) or FAILED.
"""

import asyncio
import logging
import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from rlkit.engines.client import EngineClient
from rlkit.rollout.engine_use import EngineUse
from rlkit.types.errors import EngineError, EngineUnavailable
from rlkit.types.generation import FinishReason, GenerateRequest, Generation, SamplingParams
from rlkit.types.samples import Sample, SampleStatus

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 5
"""Requests sent for one turn of a sample, before it counts as FAILED."""
FIRST_BACKOFF_S = 0.5
"""Pause before the second attempt; it doubles with each further one: 7.5 s in all."""
LONGEST_BACKOFF_S = 4.0
YIELD_S = 0.1
"""A request that an update ends in the engine's queue lets those that were running go on first."""
REPEAT_ABORT_S = 1.0
"""An abort is repeated at this pace: a request that was on its way to an engine slips through the first one."""

_STATUS = {
    FinishReason.STOP: SampleStatus.COMPLETED,
    FinishReason.LENGTH: SampleStatus.TRUNCATED,
    FinishReason.ABORT: SampleStatus.ABORTED,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What happened on the way, beside what the sample itself holds."""

    num_reissued: int = 0
    """Requests beyond the first."""
    error: str | None = None
    """The last engine error, where the sample is FAILED."""


def remaining_tokens(sample: Sample, *, max_response_len: int, max_context_len: int | None) -> int:
    """Tokens that may still be generated: both limits count from what the sample already holds, so a continued response
    never outgrows them. 0 or less: there is no room and no request is to be sent."""
    room = max_response_len - sample.response_length
    return room if max_context_len is None else min(room, max_context_len - sample.total_length)


def append_generation(sample: Sample, generation: Generation, *, mask_previous: bool = False) -> None:
    """Add one turn's tokens, log-probs, mask, text and weight version to the sample, and set its status.

    `mask_previous` takes the tokens of earlier turns, which older weights sampled, out of the loss. An EngineError if
    ids and log-probs differ in number or a log-prob is not finite.
    """
    num_new, num_before = len(generation.output_ids), sample.response_length
    if len(generation.logprobs) != num_new:
        raise EngineError(
            f"request {generation.rid}: {num_new} output ids but {len(generation.logprobs)} log-probs; the "
            "engine must return both"
        )
    if not math.isfinite(sum(generation.logprobs)):
        raise EngineError(
            f"request {generation.rid}: a log-prob is not finite; the engine's logits or weights are broken"
        )
    if mask_previous:
        sample.loss_mask = [0] * sample.response_length
    sample.tokens.extend(generation.output_ids)
    sample.rollout_logprobs.extend(generation.logprobs)
    sample.loss_mask.extend([1] * num_new)
    sample.response += generation.text
    for version, first in generation.version_starts or ((generation.weight_version, 0),):
        if not sample.weight_versions or sample.weight_versions[-1] != version:
            sample.weight_versions.append(version)
            sample.version_starts.append(num_before + first)
    assert generation.finish_reason is not None, "a partial stream event is not an answer"
    sample.status = _STATUS[generation.finish_reason]


async def abort_engines(engines: Sequence[EngineClient], rid: str | None = None) -> list[int]:
    """Ask every engine to stop one request, or all (None). Best effort: an engine that does not answer is logged, never
    raised.

    Returns the positions of the engines that did not answer.
    """
    answers = await asyncio.gather(*(engine.abort(rid) for engine in engines), return_exceptions=True)
    failed = []
    for position, (engine, answer) in enumerate(zip(engines, answers, strict=True)):
        if isinstance(answer, EngineError):
            logger.warning(f"engine {position} ({engine.url}) did not take the abort: {answer}")
            failed.append(position)
        elif isinstance(answer, BaseException):
            raise answer
    return failed


class Generator:
    """Bounded, failure-tolerant generation through one router. Bound to the event loop of its first call."""

    def __init__(
        self,
        router: EngineClient,
        engines: Sequence[EngineClient],
        *,
        concurrency: int,
        max_context_len: int | None,
        timeout_s: float,
        run_tag: str,
        patience_s: float = 0.0,
        follows_versions: bool = False,
        outlives_updates: bool = False,
    ) -> None:
        """`concurrency` bounds the requests in flight over all engines. `timeout_s` is the router client's limit for
        one request.

        `run_tag` begins every request id: different for every process that talks to these engines.
        `patience_s`: how long a request is issued again and again while no engine can take it, because a dead one is
        being restarted. `follows_versions`: updates do not end requests, so each answer is streamed and every stretch
        of it stamped with the weights that it comes from. `outlives_updates`: updates end requests, and what they cut
        off goes on at once, in another request.
        """
        self._router = router
        self._engines = list(engines)
        self._slots = asyncio.Semaphore(concurrency)
        self._max_context_len = max_context_len
        self._timeout_s = timeout_s
        self._run_tag = run_tag
        self._patience_s = patience_s
        self._follows_versions = follows_versions
        self._outlives_updates = outlives_updates
        self._is_aborting = False
        self._num_requests = 0
        self.use = EngineUse()

    async def generate(self, sample: Sample, sampling: SamplingParams, *, mask_previous: bool = False) -> Outcome:
        """Generate, or continue, the response in place. `sampling.max_new_tokens` is the limit of the whole response,
        over all turns.
        """
        turn = self._turn(sample, sampling)
        attempt, num_reissued, num_in_vain, first_failed = 0, 0, 0, time.monotonic()
        while turn is not None:
            if attempt:
                await asyncio.sleep(min(FIRST_BACKOFF_S * 2 ** (attempt - 1), LONGEST_BACKOFF_S))
            async with self._slots:
                if self._is_aborting:
                    sample.status = SampleStatus.ABORTED
                    return Outcome(num_reissued=num_reissued + max(attempt - 1, 0))
                try:
                    while turn is not None:
                        with self.use:
                            generation = await self._request(sample, turn)
                        append_generation(sample, generation, mask_previous=mask_previous)
                        num_reissued, attempt = num_reissued + attempt, 0
                        num_in_vain = 0 if generation.output_ids else num_in_vain + 1
                        if not self._goes_on(sample) or num_in_vain >= MAX_ATTEMPTS:
                            return Outcome(num_reissued=num_reissued)
                        if num_in_vain:
                            await asyncio.sleep(YIELD_S)
                        turn = self._turn(sample, sampling)  # in the same slot: before what has not begun
                    continue
                except EngineError as refused:
                    error = refused
                except asyncio.CancelledError:
                    sample.status = SampleStatus.ABORTED
                    raise
            if attempt == 0:
                first_failed = time.monotonic()
            attempt += 1
            logger.info(f"sample {sample.group_id}/{sample.index}, attempt {attempt} (of {MAX_ATTEMPTS}): {error}")
            if self._is_aborting:
                sample.status = SampleStatus.ABORTED
                return Outcome(num_reissued=num_reissued + attempt - 1)
            waits = isinstance(error, EngineUnavailable) and time.monotonic() - first_failed < self._patience_s
            if attempt >= MAX_ATTEMPTS and not waits:
                sample.status = SampleStatus.FAILED
                return Outcome(num_reissued=num_reissued + attempt - 1, error=str(error))
        sample.status = SampleStatus.TRUNCATED
        return Outcome(num_reissued=num_reissued)

    def _turn(self, sample: Sample, sampling: SamplingParams) -> SamplingParams | None:
        """What the next request may generate; None where there is no room."""
        budget = self.room(sample, sampling)
        if budget <= 0:
            return None
        at_least = max(0, min(sampling.min_new_tokens - sample.response_length, budget))  # of the whole response too
        return replace(sampling, max_new_tokens=budget, min_new_tokens=at_least)

    def _goes_on(self, sample: Sample) -> bool:
        """Whether an answer was cut off by a weight update alone."""
        return self._outlives_updates and sample.status is SampleStatus.ABORTED and not self._is_aborting

    async def _request(self, sample: Sample, sampling: SamplingParams) -> Generation:
        self._num_requests += 1
        rid = f"{self._run_tag}-{self._num_requests}."  # the dot: engines abort by prefix, and 1 begins 10
        request = GenerateRequest(rid=rid, input_ids=sample.tokens, sampling=sampling, seed=sample.seed)
        started = time.monotonic()
        try:
            return await (self._stream(request) if self._follows_versions else self._router.generate(request))
        except EngineError:
            if time.monotonic() - started > 0.9 * self._timeout_s:  # the router has the same limit and may be first
                await abort_engines(self._engines, rid)  # it may still be running, and its copy is about to start
            raise

    async def _stream(self, request: GenerateRequest) -> Generation:
        """The whole answer, with the weight version of each chunk as it came: an engine stamps an answer with the
        version at its end only."""
        starts: list[tuple[int, int]] = []
        length = 0
        answer: Generation | None = None
        async for answer in self._router.stream(request):
            if len(answer.output_ids) > length:
                if not starts or starts[-1][0] != answer.weight_version:
                    starts.append((answer.weight_version, length))
                length = len(answer.output_ids)
        assert answer is not None, "a stream without an event is an EngineError"
        return replace(answer, version_starts=tuple(starts))

    def room(self, sample: Sample, sampling: SamplingParams) -> int:
        """Tokens that the sample may still grow by."""
        return remaining_tokens(sample, max_response_len=sampling.max_new_tokens, max_context_len=self._max_context_len)

    def set_engines(self, engines: Sequence[EngineClient]) -> None:
        """Whom aborts go to from now on."""
        self._engines = list(engines)

    async def abort(self, pending: Collection[asyncio.Task], *, grace_s: float) -> None:
        """Stop all generation and wait for the `pending` tasks; new requests are held back meanwhile.

        Answers cut short come back as ABORTED samples with their tokens so far. Nothing here depends on any one engine:
        a request on a dead or hung engine leaves its sample as it was, ABORTED, and tasks that are not over after
        `grace_s` are cancelled.
        """
        self._is_aborting = True
        deadline = time.monotonic() + grace_s
        try:
            while True:
                await abort_engines(self._engines)
                wait_s = min(REPEAT_ABORT_S, deadline - time.monotonic())
                if wait_s > 0 and pending:
                    _, pending = await asyncio.wait(pending, timeout=wait_s)
                if not pending or wait_s <= 0:
                    break
            for task in pending:
                task.cancel()
            if pending:
                await asyncio.wait(pending)
        finally:
            self._is_aborting = False
