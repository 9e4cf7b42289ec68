"""Messages as OpenAI's chat API has them: read from a request, compared, and written out of what a model said.

A model asks for tools in the format of Hermes and Qwen, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
Called by `rollout/`.
"""

import contextlib
import json
import re
from typing import Any

from rlkit.types.errors import DataError

Message = dict[str, Any]
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


def read_messages(value: object) -> list[Message]:
    """The messages of a request as chat templates want them: content as text, arguments of calls as objects.

    DataError, for whoever sent them, where they are no messages or hold something else than text.
    """
    if not isinstance(value, list) or not value:
        raise DataError("messages must be a list of at least one message")
    return [_read_message(message, place) for place, message in enumerate(value)]


def _read_message(message: object, place: int) -> Message:
    where = f"messages[{place}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise DataError(f"{where} must be an object with a role")
    read: Message = {**message, "content": _text(message.get("content"), where)}
    calls = message.get("tool_calls")
    if calls:
        read["tool_calls"] = [_read_call(call, where) for call in calls]
    else:
        read.pop("tool_calls", None)
    return read


def _text(content: object, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise DataError(f"{where}: content must be a string or parts of type text; the policy reads text only")
    return "".join(str(text) for text in texts)


def _read_call(call: object, where: str) -> Message:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"{where}: a tool call must have a function with a name and arguments")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):  # templates that write arguments as they are cope with text
            arguments = json.loads(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def are_same(ours: Message, theirs: Message) -> bool:
    """Whether a message that comes back is the one that was recorded. Ids of calls and fields that clients add do not
    count; content does, to the character."""
    return ours["role"] == theirs["role"] and ours["content"] == theirs["content"] and _calls(ours) == _calls(theirs)


def _calls(message: Message) -> list[tuple[Any, Any]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]


def reply_message(text: str, *, with_tools: bool, call_prefix: str) -> tuple[Message, bool]:
    """(the assistant message that says `text`, as `read_messages` makes it; whether a call in it cannot be read).

    Only `with_tools`, where the request offered some, are calls looked for; one that cannot be read stays text.
    `call_prefix` begins the ids of the calls.
    """
    plain: Message = {"role": "assistant", "content": text}
    found = list(_CALL.finditer(text)) if with_tools else []
    if not found:
        return plain, with_tools and "<tool_call>" in text
    calls: list[Message] = []
    for number, match in enumerate(found):
        try:
            call = json.loads(match[1])
        except ValueError:
            return plain, True
        arguments = call.get("arguments", {}) if isinstance(call, dict) else None
        if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not isinstance(arguments, dict):
            return plain, True
        function = {"name": call["name"], "arguments": arguments}
        calls.append({"id": f"{call_prefix}-{number}", "type": "function", "function": function})
    return {"role": "assistant", "content": text[: found[0].start()].rstrip(), "tool_calls": calls}, False


def on_the_wire(message: Message) -> Message:
    """The same as a client expects it: arguments as JSON text, no content beside calls as null."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in calls
    ]
    return {**message, "content": message["content"] or None, "tool_calls": written}
