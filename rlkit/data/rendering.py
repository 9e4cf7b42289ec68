"""From a row to the token ids that a prompt consists of: chat template, tools, exactly one BOS. Called by `prompts.py`.

The same ids go to the engine and to the trainer; nobody renders a prompt a second time.
"""

import json
from typing import Any

from rlkit.config.schema import DataConfig
from rlkit.data.tokenizer import Tokenizer
from rlkit.types.errors import DataError

Row = dict[str, Any]


class PromptRenderer:
    """Renders rows of one file by one tokenizer."""

    def __init__(self, cfg: DataConfig, tokenizer: Tokenizer) -> None:
        """DataError when a chat template is asked for and the tokenizer has none."""
        self._cfg = cfg
        self._tokenizer = tokenizer
        self._adds_bos = _adds_bos(tokenizer)
        if cfg.apply_chat_template and tokenizer.chat_template is None:
            raise DataError(
                "--apply-chat-template is set, but the tokenizer has no chat template; leave it out, or add one"
            )

    def render(self, row: Row, place: str) -> tuple[str, list[int]]:
        """(rendered text, its token ids), never empty. `place` names the row in messages."""
        prompt = required(row, self._cfg.input_key, "--input-key", place)
        if self._cfg.apply_chat_template:
            text = self._apply_template(_as_messages(prompt, self._cfg.input_key, place), self.tools(row, place), place)
            adds_bos = False  # the template has the last word on it
        else:
            text = self._plain_text(prompt, place)
            adds_bos = self._adds_bos and not text.startswith(self._tokenizer.bos_token or "\0")
        try:
            token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError) as error:  # a lone surrogate, which JSON can spell and UTF-8 cannot
            raise DataError(f"{place}: {self._cfg.input_key!r} is not valid Unicode text: {error}") from error
        if adds_bos:
            assert self._tokenizer.bos_token_id is not None
            token_ids = [self._tokenizer.bos_token_id, *token_ids]
        if not token_ids:
            raise DataError(f"{place}: the prompt in {self._cfg.input_key!r} is empty")
        return text, token_ids

    def messages(self, row: Row, place: str) -> list[dict[str, Any]] | None:
        """The messages of a prompt; None for plain text."""
        if not self._cfg.apply_chat_template:
            return None
        return _as_messages(required(row, self._cfg.input_key, "--input-key", place), self._cfg.input_key, place)

    def tools(self, row: Row, place: str) -> list[Any] | None:
        """The tool definitions of a row: a list, or one written as a JSON string."""
        tools = row.get(self._cfg.tool_key)
        if isinstance(tools, str) and tools.strip():
            try:
                tools = json.loads(tools)
            except ValueError as error:
                raise DataError(f"{place}: {self._cfg.tool_key!r} is not JSON: {error}") from error
        if not tools:
            return None
        if not isinstance(tools, list):
            raise DataError(
                f"{place}: {self._cfg.tool_key!r} must be a list of tools, this is a {type(tools).__name__}"
            )
        return tools

    def metadata(self, row: Row, place: str) -> dict[str, Any]:
        """What graders and hooks see: the metadata column, and the tools under `tools`."""
        metadata = row.get(self._cfg.metadata_key)
        if metadata is None:
            metadata = {}
        if not isinstance(metadata, dict):
            raise DataError(
                f"{place}: {self._cfg.metadata_key!r} must be a JSON object, this is a {type(metadata).__name__}; "
                "name another column with --metadata-key"
            )
        tools = self.tools(row, place)
        return metadata if tools is None else {"tools": tools, **metadata}

    def _plain_text(self, prompt: Any, place: str) -> str:
        if isinstance(prompt, str):
            return prompt
        remedy = (
            "add --apply-chat-template" if isinstance(prompt, list) else "a prompt is a string or a list of messages"
        )
        raise DataError(f"{place}: {self._cfg.input_key!r} is a {type(prompt).__name__}, not a string; {remedy}")

    def _apply_template(self, messages: list[dict[str, Any]], tools: list[Any] | None, place: str) -> str:
        kwargs = {"add_generation_prompt": True, **self._cfg.apply_chat_template_kwargs}
        try:
            text = self._tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **kwargs)
        except (
            Exception
        ) as error:  # a template is a program and may raise anything; it does so to refuse a conversation
            raise DataError(
                f"{place}: the chat template refuses this prompt: {type(error).__name__}: {error}"
            ) from error
        assert isinstance(text, str), "tokenize=False returns text"
        return text


def check_unicode(value: Any, place: str) -> None:
    """DataError, which begins with `place`, when a text in a JSON value holds a lone surrogate: JSON can spell it, but
    it cannot be written to any file."""
    if isinstance(value, str):
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise DataError(f"{place} is not valid Unicode text: {error}") from error
    elif isinstance(value, dict):
        for key, item in value.items():
            check_unicode(key, place)
            check_unicode(item, place)
    elif isinstance(value, list | tuple):
        for item in value:
            check_unicode(item, place)


def required(row: Row, key: str, flag: str, place: str) -> Any:
    """A column that must be there."""
    if key not in row:
        present = ", ".join(map(repr, row)) or "no keys"
        raise DataError(f"{place}: there is no {key!r} ({flag}); the row has {present}")
    return row[key]


def _as_messages(prompt: Any, key: str, place: str) -> list[dict[str, Any]]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise DataError(f"{place}: {key!r} must be a string or a non-empty list of messages, this is {prompt!r:.80}")
    for message in prompt:
        if not isinstance(message, dict) or "role" not in message:
            raise DataError(f"{place}: {key!r} holds a message without a role: {message!r:.80}")
    return prompt


def _adds_bos(tokenizer: Tokenizer) -> bool:
    """Whether this tokenizer puts a BOS in front of plain text by default. EOS, which some append, never belongs behind
    a prompt.
    """
    bos = tokenizer.bos_token_id
    return bos is not None and tokenizer.encode("a")[:1] == [bos] != tokenizer.encode("a", add_special_tokens=False)[:1]
