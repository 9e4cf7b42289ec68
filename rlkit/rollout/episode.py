"""What one episode of an agent leaves to train on: its requests, as trajectories of tokens that only grow.

A request whose messages begin with a recorded conversation goes on with the very ids that the engine sampled; only what
is new is tokenised, and masked. Called by `agent_endpoint.py` and `agents.py`.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlkit.data.chat_messages import Message, are_same, reply_message
from rlkit.data.chat_tokens import ChatTokens
from rlkit.rollout.turns import Turns
from rlkit.types.errors import RlkitError
from rlkit.types.generation import SamplingParams
from rlkit.types.samples import Sample, SampleStatus

MAX_SEED = 2**31 - 1


class EpisodeOverError(RlkitError):
    """No further reply: generation is being cut off, an engine failed, or the agent has ended."""


class NoRoomError(RlkitError):
    """The conversation leaves no room for a reply."""


class TooManyTurnsError(RlkitError):
    """More requests than `--agent-max-turns`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """What a request is answered with."""

    message: Message
    finish_reason: str
    """`stop`, `tool_calls` or `length`."""
    num_prompt_tokens: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Turn:
    """A place where a reply ended."""

    num_messages: int
    num_tokens: int
    status: SampleStatus


@dataclass(kw_only=True, slots=True)
class _Segment:
    """One conversation: a sample that grows, and the messages that it stands for."""

    sample: Sample
    tools: list[Any] | None
    messages: list[Message] = field(default_factory=list[Message])
    turns: list[_Turn] = field(default_factory=list[_Turn])
    is_busy: bool = False
    """A request is being answered."""


class Episode:
    """One run of an agent. All requests are answered on one event loop."""

    def __init__(self, first: Sample, turns: Turns, chat: ChatTokens, sampling: SamplingParams, *, max_turns: int):
        """`first` says whose episode it is (group, index, seed, label, metadata); its tokens are not used."""
        self._first = first
        self._turns = turns
        self._chat = chat
        self._sampling = sampling
        self._max_turns = max_turns
        self._segments: list[_Segment] = []
        self._last_text = ""
        self._is_ended = False
        self._requests: set[asyncio.Task[Any]] = set()
        self.over = asyncio.Event()
        """Set when generation was cut off or an engine failed: nothing that the agent does matters any more."""
        self.status = SampleStatus.PENDING
        """ABORTED or FAILED once `over` is set."""
        self.is_full = False
        """A request was refused because no room was left."""
        self.counts: Counter[str] = Counter()
        """`turns`, `conversations`, `branches`, `rewritten`, `ill_formed_calls`."""

    async def complete(
        self, messages: list[Message], tools: list[Any] | None, *, max_tokens: int | None, stop: Sequence[str]
    ) -> Reply:
        """One reply of the policy. EpisodeOverError, NoRoomError, TooManyTurnsError, or a DataError where the template
        refuses the messages."""
        if self._is_ended or self.over.is_set():
            raise EpisodeOverError("the episode is over")
        if self.counts["turns"] >= self._max_turns:
            raise TooManyTurnsError(f"the episode had its {self._max_turns} replies (--agent-max-turns)")
        self.counts["turns"] += 1
        task = asyncio.current_task()
        assert task is not None
        self._requests.add(task)
        try:
            segment = self._segment(messages, tools)
            segment.is_busy = True
            try:
                return await self._reply(segment, messages, max_tokens, stop)
            finally:
                segment.is_busy = False
        finally:
            self._requests.discard(task)

    async def end(self) -> None:
        """Refuse further requests and cut off those in flight."""
        self._is_ended = True
        pending = list(self._requests)
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)

    def samples(self, reward: float | None) -> list[Sample]:
        """What there is to train on: every conversation up to its last reply, all with the same reward and, for the
        grader, the same response: the text of the episode's last reply."""
        kept = [segment for segment in self._segments if segment.turns]
        for segment in kept:
            self._cut(segment)
            segment.sample.reward = reward
            segment.sample.response = self._last_text
        return [segment.sample for segment in kept]

    # ---- where a request belongs -----------------------------------------------------------------------------------

    def _segment(self, messages: list[Message], tools: list[Any] | None) -> _Segment:
        """The conversation that the request goes on with, ready for a reply: an old one, a branch of one, a new one."""
        found = self._longest_match(messages, tools)
        if found is not None:
            segment, turn = found
            new = messages[turn.num_messages :]
            last_id = segment.sample.tokens[turn.num_tokens - 1]
            known = segment.messages[: turn.num_messages]
            bridge = self._chat.bridge(known, new, tools, last_id=last_id)
            if bridge is not None and turn is segment.turns[-1] and not segment.is_busy:
                if not self._turns.append(segment.sample, bridge):
                    raise self._no_room(segment.sample)
                return segment
            if bridge is not None:
                self.counts["branches"] += 1
                return self._new([*segment.sample.tokens[: turn.num_tokens], *bridge], tools)
        is_rewritten = any(message["role"] == "assistant" for message in messages)
        self.counts["rewritten" if is_rewritten else "conversations"] += 1
        return self._new(self._chat.opening(messages, tools), tools)

    def _longest_match(self, messages: list[Message], tools: list[Any] | None) -> tuple[_Segment, _Turn] | None:
        """The recorded reply behind which the request goes on: of the longest beginning that both have."""
        best: tuple[_Segment, _Turn] | None = None
        for segment in self._segments:
            if segment.tools != tools:
                continue
            for turn in segment.turns:
                count = turn.num_messages
                if count >= len(messages) or (best is not None and count < best[1].num_messages):
                    continue
                if all(map(are_same, segment.messages[:count], messages[:count])):
                    is_end = turn is segment.turns[-1] and not segment.is_busy
                    if best is None or count > best[1].num_messages or is_end:
                        best = segment, turn
        return best

    def _new(self, ids: list[int], tools: list[Any] | None) -> _Segment:
        """A segment with these ids as its prompt; nothing in it is trained on but what follows."""
        first = self._first
        sample = Sample(
            group_id=first.group_id,
            index=first.index,
            seed=(first.seed + len(self._segments)) & MAX_SEED,  # two requests for the same must not get the same
            tokens=ids,
            prompt_length=len(ids),
            label=first.label,
            metadata=first.metadata,
        )
        segment = _Segment(sample=sample, tools=tools)
        self._segments.append(segment)
        return segment

    # ---- the reply ---------------------------------------------------------------------------------------------------

    async def _reply(
        self, segment: _Segment, messages: list[Message], max_tokens: int | None, stop: Sequence[str]
    ) -> Reply:
        sample = segment.sample
        num_before, num_chars = len(sample.tokens), len(sample.response)
        limit = self._sampling.max_new_tokens
        if max_tokens is not None:
            limit = min(limit, sample.response_length + max_tokens)
        sampling = replace(self._sampling, max_new_tokens=limit, stop=(*self._sampling.stop, *stop))
        await self._turns.generate(sample, sampling)
        if sample.status in (SampleStatus.ABORTED, SampleStatus.FAILED):
            self.status = sample.status
            self.over.set()
            raise EpisodeOverError(
                "generation was cut off" if sample.status is SampleStatus.ABORTED else "engine failed"
            )
        num_new = len(sample.tokens) - num_before
        if num_new == 0:
            raise self._no_room(sample)
        text = sample.response[num_chars:]
        prefix = f"call-{self._segments.index(segment)}-{len(segment.turns)}"
        message, is_ill_formed = reply_message(text, with_tools=bool(segment.tools), call_prefix=prefix)
        self.counts["ill_formed_calls"] += is_ill_formed
        segment.messages = [*messages, message]
        turn = _Turn(num_messages=len(segment.messages), num_tokens=len(sample.tokens), status=sample.status)
        segment.turns.append(turn)
        self._last_text = text
        finish = "length" if sample.status is SampleStatus.TRUNCATED else "stop"
        return Reply(
            message=message,
            finish_reason="tool_calls" if "tool_calls" in message and finish == "stop" else finish,
            num_prompt_tokens=num_before,
            num_tokens=num_new,
        )

    def _no_room(self, sample: Sample) -> NoRoomError:
        self.is_full = True
        return NoRoomError(
            f"the conversation has {len(sample.tokens)} tokens and leaves no room for a reply"
            " (--rollout-max-response-len, --rollout-max-context-len)"
        )

    def _cut(self, segment: _Segment) -> None:
        """Take away what stands behind the last whole reply."""
        sample, last = segment.sample, segment.turns[-1]
        length = last.num_tokens - sample.prompt_length
        del sample.tokens[last.num_tokens :]
        del sample.loss_mask[length:], sample.rollout_logprobs[length:]
        kept = sum(start < length for start in sample.version_starts)
        del sample.weight_versions[kept:], sample.version_starts[kept:]
        sample.status = last.status
