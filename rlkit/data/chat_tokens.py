"""A conversation as token ids that only grow at their end: its opening, and what lies between two replies.

Templates rewrite history (Qwen3 drops thinking of earlier turns) and text does not always become the ids that it came
from. So a conversation is rendered once, and later only what is new: the difference that new messages make to a
rendering. Called by `rollout/episode.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rlkit.data.chat_messages import Message
from rlkit.data.tokenizer import Tokenizer
from rlkit.types.errors import DataError

_STUB = "A stub reply."


class ChatTokens:
    """Renders by the chat template of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, template_kwargs: Mapping[str, Any]) -> None:
        """DataError where the tokenizer has no chat template, or one that shows no reply of the assistant."""
        if tokenizer.chat_template is None:
            raise DataError("an agent sends messages, but the tokenizer has no chat template; add one to the model")
        self._tokenizer = tokenizer
        self._kwargs = dict(template_kwargs)
        told = self._render([{"role": "user", "content": "u"}, {"role": "assistant", "content": _STUB}], None)
        _, stub, self._closing = told.rpartition(_STUB)
        if not stub:
            raise DataError(f"the chat template shows no reply of the assistant: {told!r:.200}")

    def opening(self, messages: Sequence[Message], tools: list[Any] | None) -> list[int]:
        """The ids of a conversation up to where the assistant speaks. DataError where the template refuses it."""
        return self._encode(self._render(messages, tools, generates=True))

    def bridge(
        self, known: Sequence[Message], new: Sequence[Message], tools: list[Any] | None, *, last_id: int
    ) -> list[int] | None:
        """The ids between the reply that ends `known` and the next one: the rest of the template's closing, and `new`.

        `last_id`: the last token of that reply, which may be the closing's first. None where the template does not show
        `new` as something that follows.
        """
        added = self._added(known, new, tools)
        if added is None:
            stub = {**known[-1], "content": _STUB}
            added = self._added([{"role": "user", "content": "u"}, stub], new, tools)
        if added is None:
            return None
        closing = self._closing
        if last_id in self._tokenizer.all_special_ids:
            closing = closing.removeprefix(self._tokenizer.decode([last_id]))
        return self._encode(closing + added)

    def _added(self, known: Sequence[Message], new: Sequence[Message], tools: list[Any] | None) -> str | None:
        try:
            before = self._render(known, tools)
            after = self._render([*known, *new], tools, generates=True)
        except DataError:
            return None
        if not before.endswith(self._closing) or not after.startswith(before):
            return None
        return after[len(before) :]

    def _render(self, messages: Sequence[Message], tools: list[Any] | None, *, generates: bool = False) -> str:
        kwargs = {**self._kwargs, "add_generation_prompt": generates}
        try:
            text = self._tokenizer.apply_chat_template(list(messages), tools=tools, tokenize=False, **kwargs)
        except Exception as error:  # a template is a program and may raise anything
            raise DataError(f"the chat template refuses the messages: {type(error).__name__}: {error}") from error
        assert isinstance(text, str), "tokenize=False returns text"
        return text

    def _encode(self, text: str) -> list[int]:
        try:
            return self._tokenizer.encode(text, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError) as error:  # a lone surrogate
            raise DataError(f"the messages are not valid Unicode text: {error}") from error
