"""Where a response states its answer: after the thinking, in the last box, behind a marker. Called by the graders.

Every function is linear in the length of the text and needs no third-party package.
"""

import re

MAX_ANSWER_CHARS = 20_000
"""A longer box is not an answer."""

_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"
_BOX_COMMANDS = ("\\boxed", "\\fbox")
_UNBRACED = re.compile(r"\s*([+-]?\w[\w.]*)")
_ANSWER_MARKER = re.compile(r"answer[*_ \t]*[:：]", re.IGNORECASE)
_HASH_MARKER = "####"
_STATED = re.compile(r"answer\s+is\b[ \t]*[:：]?|answer[*_ \t]*[:：]", re.IGNORECASE)


def has_closed_thinking(text: str) -> bool:
    return _THINK_CLOSE in text


def after_thinking(text: str) -> str:
    """The part that answers: behind the last `</think>`, and before thinking that is opened and never closed.

    An answer that stands only inside the thinking was considered, not given.
    """
    close = text.rfind(_THINK_CLOSE)
    rest = text if close < 0 else text[close + len(_THINK_CLOSE) :]
    reopened = rest.find(_THINK_OPEN)
    return rest if reopened < 0 else rest[:reopened]


def has_box(text: str) -> bool:
    return any(command in text for command in _BOX_COMMANDS)


def last_box(text: str) -> str | None:
    """Content of the last `\\boxed{...}` or `\\fbox{...}`, braces balanced and escaped braces not counted.

    None when there is no box, or when the last one never closes: the response was cut off before its answer, and an
    earlier box is not it.
    """
    start = max(text.rfind(command) for command in _BOX_COMMANDS)
    if start < 0:
        return None
    after = start + (len("\\boxed") if text.startswith("\\boxed", start) else len("\\fbox"))
    opening = after
    while opening < len(text) and text[opening].isspace():
        opening += 1
    if opening < len(text) and text[opening] == "{":
        closing = _matching_brace(text, opening)
        return None if closing is None else text[opening + 1 : closing].strip()
    unbraced = _UNBRACED.match(text, after)  # \boxed 42, which TeX accepts for one token
    return unbraced.group(1).rstrip(".") if unbraced else None


def _matching_brace(text: str, opening: int) -> int | None:
    depth = 0
    position = opening
    end = min(len(text), opening + MAX_ANSWER_CHARS)
    while position < end:
        char = text[position]
        if char == "\\":
            position += 2  # skips \{ and \}, and the second half of a line break
            continue
        if char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
            if depth == 0:
                return position
        position += 1
    return None


def answer_line(text: str) -> str | None:
    """What follows the last `Answer:` up to the end of its line (or the next non-empty line), in any case and with
    Markdown stars.

    None when the marker is missing; an empty string when nothing follows it.
    """
    end = _end_of_last(_ANSWER_MARKER, text)
    return None if end is None else _first_line(text[end : end + MAX_ANSWER_CHARS])


def label_answer(label: str) -> str:
    """The answer inside a label: its last box, what follows GSM8K's `####`, what follows "answer is", or else all of
    it.
    """
    boxed = last_box(label)
    if boxed is not None:
        return boxed
    if _HASH_MARKER in label:
        return _first_line(label.rpartition(_HASH_MARKER)[2])
    end = _end_of_last(_STATED, label)
    return label.strip() if end is None else _first_line(label[end:])


def _end_of_last(pattern: re.Pattern[str], text: str) -> int | None:
    ends = [match.end() for match in pattern.finditer(text)]
    return ends[-1] if ends else None


def _first_line(text: str) -> str:
    return text.strip("*_ \t\r\n").partition("\n")[0].strip("*_ \t\r")
