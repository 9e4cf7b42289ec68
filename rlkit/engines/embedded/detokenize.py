"""Text of a response while it grows, and the stop string that ends it.

A token's text can depend on the one before (leading spaces, characters of several byte tokens), so text is decoded
from a few prompt tokens on and what the prompt contributes is cut off. Used by `request.py` on the engine thread.
"""

from collections.abc import Sequence

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

CONTEXT_TOKENS = 5
"""Prompt tokens that are decoded together with the response."""
INCOMPLETE = "\ufffd"
"""What a tokenizer gives for bytes that are no whole character yet."""
MAX_PENDING_TOKENS = 8
"""Bytes that are no character after so many tokens will never be one."""


class IncrementalText:
    """Text of one response. Each call decodes the new tokens and a short tail only."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], *, skip_special_tokens: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._tail = list(prompt[-CONTEXT_TOKENS:])
        self._num_settled = len(self._tail)
        """Tokens of `_tail` whose text is in `_text` (or belongs to the prompt)."""
        self._num_seen = 0
        self._text = ""

    def read(self, output_ids: Sequence[int], *, is_final: bool = False) -> str:
        """Text of `output_ids`, which continue what the last call was given.

        Bytes of an unfinished character are held back until it is complete, or until `is_final`.
        """
        self._tail.extend(output_ids[self._num_seen :])
        self._num_seen = len(output_ids)
        settled = self._decode(self._tail[: self._num_settled])
        decoded = self._decode(self._tail)
        fresh = decoded[len(settled) :]
        if fresh.endswith(INCOMPLETE) and len(self._tail) - self._num_settled <= MAX_PENDING_TOKENS:
            return self._text + (fresh if is_final else fresh.rstrip(INCOMPLETE))
        self._text += fresh
        if self._num_settled < len(self._tail):
            self._tail = self._tail[-CONTEXT_TOKENS:]
            self._num_settled = len(self._tail)
        return self._text

    def _decode(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)
        assert isinstance(text, str)
        return text


class StopStringFinder:
    """Looks for the stop strings of one request in its text, special tokens included."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], stop: Sequence[str]) -> None:
        self._text = IncrementalText(tokenizer, prompt)
        self._stop = [text for text in stop if text]
        self._overlap = max((len(text) for text in self._stop), default=1) - 1
        self._num_searched = 0

    def find(self, output_ids: Sequence[int]) -> str | None:
        """The first stop string, in the order given, that the text now contains."""
        text = self._text.read(output_ids)
        fresh = text[max(self._num_searched - self._overlap, 0) :]
        self._num_searched = len(text)
        return next((stop for stop in self._stop if stop in fresh), None)
