"""Whole conversations: which tokens an assistant said, through several kinds of chat templates."""

from collections.abc import Callable
from typing import Any

import pytest
from word_tokenizer import word_tokenizer

from rlkit.config.schema import AlgoConfig, DataConfig, RunConfig
from rlkit.data.conversations import tokenize_conversation
from rlkit.data.prompts import GivenResponses, PromptSource
from rlkit.data.sft import fill_in_label, fill_in_pair
from rlkit.data.tokenizer import Tokenizer
from rlkit.types.errors import DataError
from rlkit.types.samples import Sample, SampleStatus

CHATML = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] | trim }} [end] {% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
THINKING = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}[{{ m['role'] }}] "
    "{% set text = m['content'] or '' %}{% set thought = '' %}"
    "{% if '</think>' in text %}{% set thought = text.split('</think>')[0] | replace('<think>', '') | trim %}"
    "{% set text = text.split('</think>')[1] | trim %}{% endif %}"
    "{% if m['role'] == 'assistant' and loop.index0 > ns.last %}<think> {{ thought }} </think> {% endif %}"
    "{{ text }} {% for call in m['tool_calls'] or [] %}<call> {{ call['name'] }} </call> {% endfor %}[end] "
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
"""As Qwen3's: earlier thoughts are dropped, the last turn always has a place for some, tools are called."""
BARE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"

WORDS = ["[system]", "[user]", "[assistant]", "[tool]", "[end]", "<think>", "</think>", "<call>", "</call>"]
VOCAB = {word: 3 + n for n, word in enumerate([*WORDS, *(f"w{n}" for n in range(40))])}

TWO_TURNS = [
    {"role": "system", "content": "w0"},
    {"role": "user", "content": "w1"},
    {"role": "assistant", "content": "w2 w3"},
    {"role": "user", "content": "w4"},
    {"role": "assistant", "content": "w5"},
]


def tokenizer_of(template: str) -> Tokenizer:
    return word_tokenizer(VOCAB, template=template, bos=False)


def trained(messages: list[dict[str, Any]], template: str = CHATML, *, num_given: int = 0, **kwargs: Any) -> list[str]:
    """Trained tokens as words, `|` where untrained ones lie between."""
    tokenizer = tokenizer_of(template)
    done = tokenize_conversation(
        messages, tokenizer, num_given=num_given, tools=None, template_kwargs=kwargs, place="row 0"
    )
    assert len(done.token_ids) == len(done.loss_mask) and done.loss_mask[-1] == 1
    words, before = [], 1
    for token, is_trained in zip(tokenizer.convert_ids_to_tokens(done.token_ids), done.loss_mask, strict=True):
        words += (["|"] if words and not before else []) + [token] if is_trained else []
        before = is_trained
    return words


def test_every_turn_of_the_assistant_is_trained_to_its_end():
    assert trained(TWO_TURNS) == ["w2", "w3", "[end]", "|", "w5", "[end]"]
    done = tokenize_conversation(
        TWO_TURNS, tokenizer_of(CHATML), num_given=0, tools=None, template_kwargs={}, place="row 0"
    )
    prompt = ["[system]", "w0", "[end]", "[user]", "w1", "[end]", "[assistant]"]
    second = ["[user]", "w4", "[end]", "[assistant]", "w5", "[end]"]
    words = [*prompt, "w2", "w3", "[end]", *second]
    assert done.token_ids == [VOCAB[word] for word in words]
    assert done.loss_mask == [0] * 7 + [1] * 3 + [0] * 4 + [1] * 2
    assert done.prompt_length == 7


def test_a_message_can_be_left_out_of_the_loss():
    messages = [dict(message) for message in TWO_TURNS]
    messages[2]["step_loss_mask"] = 0
    assert trained(messages) == ["w5", "[end]"]
    messages[4]["step_loss_mask"] = 0
    with pytest.raises(DataError, match="no assistant message to train on"):
        trained(messages)


def test_given_messages_are_not_trained():
    assert trained(TWO_TURNS, num_given=4) == ["w5", "[end]"]


def test_repeated_words_do_not_confuse_turns():
    messages = [{"role": role, "content": "w1"} for role in ("user", "assistant", "user", "assistant")]
    assert trained(messages) == ["w1", "[end]", "|", "w1", "[end]"]


def test_a_template_that_rewrites_thoughts():
    """The last turn's empty place for thoughts is what the policy would have to write; the earlier turn has none."""
    assert trained(TWO_TURNS, THINKING) == ["w2", "w3", "[end]", "|", "<think>", "</think>", "w5", "[end]"]
    messages = [*TWO_TURNS[:4], {"role": "assistant", "content": "<think>w7</think> w5"}]
    messages[2] = {"role": "assistant", "content": "<think>w6</think> w2"}
    assert trained(messages, THINKING) == ["w2", "[end]", "|", "<think>", "w7", "</think>", "w5", "[end]"]


def test_tool_calls_are_trained_and_their_answers_are_not():
    messages = [
        {"role": "user", "content": "w1"},
        {"role": "assistant", "content": "w2", "tool_calls": [{"name": "w9"}]},
        {"role": "tool", "content": "w3"},
        {"role": "assistant", "content": "w4"},
    ]
    first = ["<think>", "</think>", "w2", "<call>", "w9", "</call>", "[end]"]
    assert trained(messages, THINKING) == [*first, "|", "<think>", "</think>", "w4", "[end]"]


def test_a_template_without_marks_ends_the_last_turn_with_eos():
    assert trained(TWO_TURNS[1:], BARE) == ["w2", "w3", "|", "w5", "<eos>"]
    assert trained(TWO_TURNS[1:4], BARE) == ["w2", "w3"], "what follows is no end"


def test_a_template_that_scatters_a_turn_is_refused():
    scattered = "{% for m in messages %}{{ m['content'] }} {% endfor %}{{ messages[-1]['content'] }}"
    with pytest.raises(DataError, match=r"row 0: the chat template does not render message 1 .* in one piece"):
        trained(TWO_TURNS[1:3], scattered)


def config(loss_type: str, path: str, **data: Any) -> RunConfig:
    return RunConfig(
        algo=AlgoConfig(loss_type=loss_type),  # pyright: ignore[reportArgumentType]
        data=DataConfig(prompt_data=path, apply_chat_template=True, **data),
    )


def samples_of(cfg: RunConfig, tokenizer: Tokenizer, count: int) -> list[Sample]:
    """As the rollout manager makes them from the first row."""
    (prompt,) = PromptSource(cfg.data, tokenizer, given=GivenResponses.of(cfg)).next(1)
    samples = [Sample(group_id=0, index=n, seed=n, tokens=[], prompt_length=0) for n in range(count)]
    if count == 2:
        fill_in_pair(samples, prompt, tokenizer)
    else:
        fill_in_label(samples[0], prompt, tokenizer)
    for sample in samples:
        assert len(sample.loss_mask) == sample.response_length and sample.status is SampleStatus.COMPLETED
        assert sample.tokens[: sample.prompt_length] == prompt.token_ids
    return samples


def response(sample: Sample, tokenizer: Tokenizer) -> str:
    return " ".join(tokenizer.convert_ids_to_tokens(sample.tokens[sample.prompt_length :]))


def test_sft_on_whole_conversations(jsonl: Callable[..., str]):
    tokenizer = tokenizer_of(CHATML)
    cfg = config("sft_loss", jsonl([{"messages": TWO_TURNS}]), input_key="messages")
    (sample,) = samples_of(cfg, tokenizer, 1)
    assert response(sample, tokenizer) == "w2 w3 [end] [user] w4 [end] [assistant] w5 [end]"
    assert sample.loss_mask == [1, 1, 1, 0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize(
    "messages, complaint",
    [
        (TWO_TURNS[:2], "has no assistant message"),
        (TWO_TURNS[2:], "begins with the assistant"),
        ("w1", "must be a non-empty list of messages"),
        ([{"content": "w1"}], "message without a role"),
    ],
)
def test_a_conversation_that_teaches_nothing_is_refused(jsonl: Callable[..., str], messages: Any, complaint: str):
    cfg = config("sft_loss", jsonl([{"messages": messages}]), input_key="messages")
    with pytest.raises(DataError, match=complaint):
        PromptSource(cfg.data, tokenizer_of(CHATML), given=GivenResponses.of(cfg))


PROMPT = TWO_TURNS[:2]
SAY = {"role": "assistant", "content": "w3"}


@pytest.mark.parametrize(
    "chosen, rejected",
    [("w2", "w3"), ([TWO_TURNS[2] | {"content": "w2"}], [SAY]), ([*PROMPT, SAY | {"content": "w2"}], [*PROMPT, SAY])],
    ids=["texts", "messages", "whole conversations"],
)
def test_pairs_of_any_form_become_the_same_samples(jsonl: Callable[..., str], chosen: Any, rejected: Any):
    tokenizer = tokenizer_of(CHATML)
    cfg = config("dpo_loss", jsonl([{"prompt": PROMPT, "chosen": chosen, "rejected": rejected}]), input_key="prompt")
    samples = samples_of(cfg, tokenizer, 2)
    assert [response(sample, tokenizer) for sample in samples] == ["w2 [end]", "w3 [end]"]
    assert [sample.loss_mask for sample in samples] == [[1, 1], [1, 1]]


def test_a_pair_of_equal_responses_is_refused(jsonl: Callable[..., str]):
    cfg = config("dpo_loss", jsonl([{"prompt": PROMPT, "chosen": "w2", "rejected": "w2"}]), input_key="prompt")
    with pytest.raises(DataError, match=r"row 0 .* the same"):
        samples_of(cfg, tokenizer_of(CHATML), 2)


def test_a_missing_column_is_named(jsonl: Callable[..., str]):
    path = jsonl([{"prompt": PROMPT, "chosen": "w2"}])
    cfg = config("dpo_loss", path, input_key="prompt")
    with pytest.raises(DataError, match=r"no 'rejected' \(--rejected-key\)"):
        PromptSource(cfg.data, tokenizer_of(CHATML), given=GivenResponses.of(cfg))
