"""Messages of OpenAI's API, and the token ids of a conversation that grows."""

import json
from typing import Any

import pytest
from agent_setup import CALL, END, THINKING_TEMPLATE, chat_tokenizer, letters, spell

from rlkit.data.chat_messages import are_same, on_the_wire, read_messages, reply_message
from rlkit.data.chat_tokens import ChatTokens
from rlkit.types.errors import DataError


def test_a_conversation_that_grows_is_the_one_that_is_rendered_at_once():
    tokenizer = chat_tokenizer()
    chat = ChatTokens(tokenizer, {})
    known = read_messages([{"role": "user", "content": "6*7"}, {"role": "assistant", "content": "so?"}])
    new = read_messages([{"role": "user", "content": "42"}])
    grown = [*chat.opening(known[:1], None), *letters("so?"), END]
    bridge = chat.bridge(known, new, None, last_id=END)
    assert bridge is not None and grown + bridge == chat.opening([*known, *new], None)
    cut = chat.bridge(known, new, None, last_id=letters("?")[0])  # without its end of turn, which is then added
    assert cut == [END, *bridge]


def test_a_template_that_rewrites_history_still_gives_what_is_new():
    chat = ChatTokens(chat_tokenizer(THINKING_TEMPLATE), {})
    known = read_messages([{"role": "user", "content": "a"}, {"role": "assistant", "content": "hm[/think]b"}])
    new = read_messages([{"role": "user", "content": "c"}])
    bridge = chat.bridge(known, new, None, last_id=END)
    assert bridge is not None and spell(bridge) == "\n<user>c<end>\n<assistant>"


def test_without_a_template_there_is_no_agent():
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="no chat template"):
        ChatTokens(tokenizer, {})


def test_messages_are_recognised_when_clients_dress_them():
    text = f"so{CALL}"
    ours, is_ill_formed = reply_message(text, with_tools=True, call_prefix="call")
    assert not is_ill_formed and ours["content"] == "so" and ours["tool_calls"][0]["function"]["name"] == "calculator"
    sent = on_the_wire(ours)
    assert json.loads(sent["tool_calls"][0]["function"]["arguments"]) == {"expression": "6*7"}
    (back,) = read_messages([{**sent, "refusal": None, "annotations": [], "function_call": None}])
    assert are_same(ours, back)
    (parts,) = read_messages(
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    )
    assert parts["content"] == "ab"
    (other,) = read_messages([{**sent, "content": "so "}])
    assert not are_same(ours, other)


@pytest.mark.parametrize("text", ["<tool_call>{</tool_call>", "<tool_call>[1]</tool_call>", "<tool_call>{"])
def test_calls_that_cannot_be_read_stay_text(text: str):
    message, is_ill_formed = reply_message(text, with_tools=True, call_prefix="call")
    assert is_ill_formed and message == {"role": "assistant", "content": text}
    assert reply_message(text, with_tools=False, call_prefix="call") == (message, False)


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([], "at least one"),
        ("hello", "must be a list"),
        ([{"content": "a"}], "with a role"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "text only"),
        ([{"role": "assistant", "tool_calls": [{}]}], "function with a name"),
    ],
)
def test_what_is_no_message_is_refused(messages: Any, told: str):
    with pytest.raises(DataError, match=told):
        read_messages(messages)
