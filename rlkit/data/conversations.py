"""Conversations that stand in the data: their token ids, and which of them an assistant said. Called by `sft.py`.

A conversation is rendered once, as a whole. Where an assistant's turn lies in that text is found by rendering it twice
more with other words in its place: what then differs is the turn. So any chat template will do that renders a turn in
one piece, also one that drops the thoughts of earlier turns or adds empty ones to the last.

Text is tokenised in pieces, cut where trained turns begin and end, as it is when a model generates.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from rlkit.data.tokenizer import Tokenizer
from rlkit.types.errors import DataError

Message = Mapping[str, Any]

LOSS_KEY = "step_loss_mask"
"""Key of an assistant's message: 0 keeps it out of the loss."""
_PROBES = ("<rlkit probe>", "[other words]")
"""They differ in their first and in their last character."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizedConversation:
    """Token ids up to the last trained one, and 1 for each that is trained on."""

    token_ids: list[int]
    loss_mask: list[int]
    text: str
    """What the trained turns say, one after the other."""

    @property
    def prompt_length(self) -> int:
        """Tokens before the first trained one."""
        return self.loss_mask.index(1)


def tokenize_conversation(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    *,
    num_given: int,
    tools: list[Any] | None,
    template_kwargs: Mapping[str, Any],
    place: str,
) -> TokenizedConversation:
    """Trained are the assistant's turns from message `num_given` on, each from behind the words that invite it (which
    the template adds) to the token that ends it. DataError, naming `place`, if there is none, or the template does not
    render a turn in one piece.
    """
    template = _Template(tokenizer, tools, template_kwargs, place)
    whole = template.render(messages)
    spans: list[tuple[int, int]] = []
    for number, message in enumerate(messages):
        is_trained = message.get("role") == "assistant" and message.get(LOSS_KEY, 1) not in (0, False)
        if number >= num_given and is_trained:
            spans.append(template.turn(messages, number, whole, after=spans[-1][1] if spans else 0))
    if not spans:
        raise DataError(f"{place}: there is no assistant message to train on")
    token_ids: list[int] = []
    loss_mask: list[int] = []
    position = 0
    for start, end in spans:
        for text, is_trained in ((whole[position:start], 0), (whole[start:end], 1)):
            ids = tokenizer.encode(text, add_special_tokens=False)
            token_ids += ids
            loss_mask += [is_trained] * len(ids)
        position = end
    if not whole[position:].strip() and token_ids[-1] != template.end_id:
        token_ids.append(template.end_id)  # a template without marks: the end of the text ends the turn
        loss_mask.append(1)
    return TokenizedConversation(
        token_ids=token_ids, loss_mask=loss_mask, text="".join(whole[start:end] for start, end in spans)
    )


def checked_messages(value: Any, place: str, column: str) -> list[dict[str, Any]]:
    """A list of messages with roles; anything else is a DataError."""
    if not isinstance(value, list) or not value:
        raise DataError(f"{place}: {column!r} must be a non-empty list of messages, this is {value!r:.80}")
    for message in value:
        if not isinstance(message, dict) or "role" not in message:
            raise DataError(f"{place}: {column!r} holds a message without a role: {message!r:.80}")
    return value


def split_conversation(messages: Sequence[Message], place: str, column: str) -> int:
    """Messages before the first one of the assistant; DataError where none is left on either side."""
    first = next((n for n, message in enumerate(messages) if message["role"] == "assistant"), None)
    if first is None or first == 0:
        found = "has no assistant message" if first is None else "begins with the assistant"
        raise DataError(f"{place}: the conversation in {column!r} {found}, so there is nothing to learn from it")
    return first


class _Template:
    """A tokenizer's chat template with the arguments of one row."""

    def __init__(self, tokenizer: Tokenizer, tools: list[Any] | None, kwargs: Mapping[str, Any], place: str) -> None:
        self._tokenizer = tokenizer
        self._tools = tools
        self._kwargs = {name: value for name, value in kwargs.items() if name != "add_generation_prompt"}
        self._place = place
        self.end_id = turn_end_id(tokenizer)
        self._end_text = tokenizer.decode([self.end_id])

    def render(self, messages: Sequence[Message], *, invites: bool = False) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=self._tools,
                tokenize=False,
                add_generation_prompt=invites,
                **self._kwargs,
            )
        except (
            Exception
        ) as error:  # a template is a program and may raise anything; it does so to refuse a conversation
            raise DataError(
                f"{self._place}: the chat template refuses this conversation: {type(error).__name__}: {error}"
            ) from error
        assert isinstance(text, str), "tokenize=False returns text"
        return text

    def turn(self, messages: Sequence[Message], number: int, whole: str, *, after: int) -> tuple[int, int]:
        """Where message `number` lies in the rendered conversation; not before `after`."""
        one, other = (
            self.render([*messages[:number], {"role": "assistant", "content": probe}, *messages[number + 1 :]])
            for probe in _PROBES
        )
        head, tail = _num_shared(one, other), _num_shared(one[::-1], other[::-1])
        start = min(head, _num_shared(one, whole))
        end = len(whole) - tail
        is_whole = one[head : len(one) - tail] == _PROBES[0] and whole[end:] == one[len(one) - tail :]
        if not is_whole or not after <= start <= end:
            raise DataError(
                f"{self._place}: the chat template does not render message {number} of the conversation in one piece, "
                "so its tokens cannot be told from the others"
            )
        invitation = self._invitation(messages[:number])
        if invitation:
            found = whole.rfind(invitation, after, start)
            start = found + len(invitation) if found >= 0 else start
        rest = whole[end:]
        marked = rest.lstrip()
        if marked.startswith(self._end_text):
            end += len(rest) - len(marked) + len(self._end_text)
        return start, end

    def _invitation(self, messages: Sequence[Message]) -> str:
        """What the template writes before an assistant speaks."""
        bare, inviting = self.render(messages), self.render(messages, invites=True)
        return inviting[len(bare) :] if inviting.startswith(bare) else ""


def _num_shared(one: str, other: str) -> int:
    """Characters with which both begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def turn_end_id(tokenizer: Tokenizer) -> int:
    """The special token that the chat template puts behind an assistant's words, else the end-of-sequence token."""
    probe = _PROBES[0]
    if tokenizer.chat_template is not None:
        conversation = [{"role": "user", "content": probe}, {"role": "assistant", "content": probe}]
        rendered = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=False)
        following = tokenizer.encode(rendered.rpartition(probe)[2], add_special_tokens=False)
        special = set(tokenizer.all_special_ids)
        for token_id in following:
            if token_id in special:
                return token_id
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no end-of-sequence token and its chat template ends no turn; add eos_token")
    return tokenizer.eos_token_id
