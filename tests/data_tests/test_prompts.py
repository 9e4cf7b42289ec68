"""Rendering, the stream of prompts, and its resume."""

import json
import logging
from collections import Counter

import pytest
from word_tokenizer import word_tokenizer

from rlkit.config.schema import DataConfig
from rlkit.data.prompts import PromptSource, load_prompts
from rlkit.types.errors import DataError


def numbered(count: int) -> list[dict]:
    return [{"input": f"w{n}", "label": n} for n in range(count)]


def config(path: str, **kwargs) -> DataConfig:
    return DataConfig(prompt_data=path, **{"label_key": "label", **kwargs})


# ---- rendering -----------------------------------------------------------------------------------------------------


def test_exactly_one_bos_after_templating(case, jsonl):
    da04 = case("da-04")
    given, expected = da04["input"], da04["expected"]
    vocab = {word: number for word, number in given["vocab"].items() if word != "<bos>"}
    template = given["template"].replace("{content}", "{{ messages[0]['content'] }}")
    tokenizer = word_tokenizer(vocab, template=template, bos=True)
    assert tokenizer.encode("What")[0] == 1, "the tokenizer itself adds a BOS"
    path = jsonl([{"input": given["messages"]}])
    (prompt,) = PromptSource(DataConfig(prompt_data=path, apply_chat_template=True), tokenizer).next(1)
    assert prompt.token_ids == expected["ids"]
    assert prompt.token_ids.count(1) == expected["count_of_id_1"]
    assert len(prompt.token_ids) == expected["prompt_length"]


@pytest.mark.parametrize("text", ["w1 w2", "<bos> w1 w2"], ids=["plain", "rendered before"])
def test_plain_text_gets_the_bos_it_lacks(jsonl, tokenizer, text):
    (prompt,) = PromptSource(DataConfig(prompt_data=jsonl([{"input": text}])), tokenizer).next(1)
    assert prompt.token_ids == tokenizer.convert_tokens_to_ids(["<bos>", "w1", "w2"])


def test_a_tokenizer_without_bos_gets_none(jsonl):
    tokenizer = word_tokenizer({"w1": 3}, template=None, bos=False)
    (prompt,) = PromptSource(DataConfig(prompt_data=jsonl([{"input": "w1"}])), tokenizer).next(1)
    assert prompt.token_ids == [3]


def test_strings_and_message_lists_render_alike(jsonl, tokenizer):
    messages = [{"role": "user", "content": "w5"}]
    path = jsonl([{"input": "w5"}, {"input": messages}])
    first, second = PromptSource(DataConfig(prompt_data=path, apply_chat_template=True), tokenizer).next(2)
    assert first.text == second.text == "[user]w5[end][assistant]"
    assert (
        first.token_ids == second.token_ids == tokenizer.convert_tokens_to_ids(["[user]", "w5", "[end]", "[assistant]"])
    )


def test_template_arguments_tools_and_metadata_arrive(jsonl, tokenizer):
    row = {"input": "w1", "tools": [{"name": "a"}, {"name": "b"}], "metadata": {"rm_type": "exact"}}
    as_text = {**row, "tools": json.dumps(row["tools"])}
    cfg = DataConfig(
        prompt_data=jsonl([row, as_text, {"input": "w1", "tools": None, "metadata": None}]),
        apply_chat_template=True,
        apply_chat_template_kwargs={"add_generation_prompt": False},
    )
    first, second, third = PromptSource(cfg, tokenizer).next(3)
    assert first.text == second.text == "[user]w1[end][tool]2"
    assert first.metadata == second.metadata == {"rm_type": "exact", "tools": row["tools"]}
    assert (third.text, third.metadata) == ("[user]w1[end]", {})


@pytest.mark.parametrize(
    "row, cfg, message",
    [
        ({"prompt": "w1", "answer": 1}, {}, r"no 'input' \(--input-key\); the row has 'prompt', 'answer'"),
        ({"input": "w1"}, {"label_key": "label"}, r"no 'label' \(--label-key\); the row has 'input'"),
        ({"input": [{"role": "user", "content": "w1"}]}, {}, "add --apply-chat-template"),
        ({"input": 7}, {}, "is a int, not a string"),
        ({"input": ""}, {}, "is empty"),
        ({"input": "a\ud800"}, {}, "not valid Unicode"),
        ({"input": "w1", "label": "\ud800"}, {"label_key": "label"}, "'label' is not valid Unicode"),
        ({"input": "w1", "label": ["a", "\ud800"]}, {"label_key": "label"}, "'label' is not valid Unicode"),
        ({"input": "w1", "metadata": {"a": {"b": "\udfff"}}}, {}, "'metadata' is not valid Unicode"),
        ({"input": []}, {"apply_chat_template": True}, "non-empty list of messages"),
        ({"input": ["w1"]}, {"apply_chat_template": True}, "message without a role"),
        ({"input": [{"role": "user"}]}, {"apply_chat_template": True}, "the chat template refuses"),
        ({"input": "w1", "metadata": "x"}, {}, "'metadata' must be a JSON object, this is a str"),
        ({"input": "w1", "tools": "{"}, {}, "'tools' is not JSON"),
        ({"input": "w1", "tools": {"a": 1}}, {}, "'tools' must be a list"),
    ],
)
def test_a_row_that_does_not_fit_is_named_at_the_start(jsonl, row, cfg, message):
    strict = "{% for m in messages %}{{ m['content'] + '' }}{% endfor %}"
    tokenizer = word_tokenizer({"w1": 3}, template=strict, bos=False)
    with pytest.raises(DataError, match=rf"prompts\.jsonl:1: .*{message}"):
        PromptSource(DataConfig(prompt_data=jsonl([row]), **cfg), tokenizer)


def test_a_template_that_is_not_there_is_missed_at_the_start(jsonl):
    tokenizer = word_tokenizer({"w1": 3}, template=None, bos=False)
    with pytest.raises(DataError, match="has no chat template"):
        PromptSource(DataConfig(prompt_data=jsonl([{"input": "w1"}]), apply_chat_template=True), tokenizer)


# ---- the stream ----------------------------------------------------------------------------------------------------


def test_epochs_follow_each_other_without_a_gap(jsonl, tokenizer):
    source = PromptSource(config(jsonl(numbered(5))), tokenizer)
    drawn = source.next(3) + source.next(9)
    assert len(source) == 5
    assert [(p.epoch, p.position, p.label) for p in drawn] == [(n // 5, n % 5, n % 5) for n in range(12)]


def test_shuffling_is_a_function_of_seed_and_epoch(jsonl, tokenizer):
    path = jsonl(numbered(50))

    def order(seed: int, epochs: int = 3) -> list[list[int]]:
        source = PromptSource(config(path, rollout_shuffle=True, rollout_seed=seed), tokenizer)
        return [[p.position for p in source.next(50)] for _ in range(epochs)]

    epochs = order(42)
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs + order(43)}) == 6, "every epoch and every seed has its own order"
    assert order(42) == epochs
    assert epochs[0][:8] == [3, 20, 32, 48, 34, 5, 46, 19], "the order may never change: resumed runs rely on it"


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("cut", [0, 1, 6, 7, 8, 13, 20])
def test_a_resumed_stream_is_the_uninterrupted_one(jsonl, tokenizer, shuffle, cut):
    rows = numbered(7)
    rows[3]["input"] = "w3 w3 w3 w3"  # too long
    cfg = config(jsonl(rows), rollout_shuffle=shuffle, rollout_max_prompt_len=3)
    whole = PromptSource(cfg, tokenizer)
    expected = whole.next(30)

    first = PromptSource(cfg, tokenizer)
    head = first.next(cut)
    state = json.loads(json.dumps(first.state()))
    second = PromptSource(cfg, tokenizer)
    second.load_state(state)
    assert head + second.next(30 - cut) == expected
    assert second.state() == whole.state()


def test_a_second_resume_goes_on_from_the_first(jsonl, tokenizer):
    cfg = config(jsonl(numbered(100)))
    state, positions = None, []
    for _ in range(3):
        source = PromptSource(cfg, tokenizer)
        if state is not None:
            source.load_state(state)
        positions += [p.position for p in source.next(20)]
        state = source.state()
    assert positions == list(range(60))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"rows": numbered(9)}, "content was"),
        ({"slice": "@[1:]"}, "rows was"),
        ({"rollout_shuffle": False}, "shuffle was True"),
        ({"rollout_seed": 7}, "seed was 42"),
    ],
    ids=["content", "slice", "shuffle", "seed"],
)
def test_a_place_in_other_data_is_refused(jsonl, tokenizer, change, message):
    state = PromptSource(config(jsonl(numbered(10)), rollout_shuffle=True), tokenizer).state()
    rows, cut = change.pop("rows", numbered(10)), change.pop("slice", "")
    changed = PromptSource(config(jsonl(rows, "b.jsonl") + cut, **{"rollout_shuffle": True, **change}), tokenizer)
    with pytest.raises(DataError, match=f"{message}.*--finetune --load DIR"):
        changed.load_state(state)


def test_a_moved_file_and_another_seed_without_shuffling_resume(jsonl, tokenizer):
    source = PromptSource(config(jsonl(numbered(10))), tokenizer)
    source.next(4)
    moved = PromptSource(config(jsonl(numbered(10), "moved.jsonl"), rollout_seed=7), tokenizer)
    moved.load_state(source.state())
    assert moved.next(1)[0].position == 4


def test_long_prompts_are_left_out_whole_and_counted(jsonl, tokenizer, caplog):
    rows = numbered(6)
    rows[1]["input"] = rows[4]["input"] = "w1 " * 10
    source = PromptSource(config(jsonl(rows), rollout_max_prompt_len=2), tokenizer)
    with caplog.at_level(logging.WARNING):
        drawn = source.next(8)
    assert Counter(p.position for p in drawn) == {0: 2, 2: 2, 3: 2, 5: 2}
    assert all(len(p.token_ids) == 2 for p in drawn)
    assert source.num_too_long == 4
    assert [r.getMessage() for r in caplog.records if "prompts.jsonl:2" in r.getMessage()], "said once, with the place"
    assert len(caplog.records) == 1


def test_nothing_but_long_prompts_is_an_error_not_a_loop(jsonl, tokenizer):
    source = PromptSource(config(jsonl(numbered(4)), rollout_max_prompt_len=1), tokenizer)
    with pytest.raises(DataError, match="every one of its 4 rows is longer than --rollout-max-prompt-len 1"):
        source.next(1)


@pytest.mark.parametrize("tail, held", [("", "no rows$"), ("@[20:]", "no rows; the file has 10")])
def test_no_rows_are_an_error(jsonl, tokenizer, tail, held):
    path = jsonl(numbered(10) if tail else []) + tail
    with pytest.raises(DataError, match=held):
        PromptSource(config(path), tokenizer)


# ---- evaluation sets -----------------------------------------------------------------------------------------------


def test_an_evaluation_set_is_the_whole_slice_in_order(jsonl, tokenizer, caplog):
    rows = [{"question": f"w{n}", "answer": n} for n in range(9)]
    rows[4]["question"] = "w4 " * 9
    cfg = DataConfig(prompt_data="train.jsonl", rollout_shuffle=True, rollout_max_prompt_len=5)
    prompts = load_prompts(f"{jsonl(rows)}@[2:]", cfg, tokenizer, input_key="question", label_key="answer")
    assert [p.label for p in prompts] == [2, 3, 5, 6, 7, 8]
    assert [p.position for p in prompts] == [0, 1, 3, 4, 5, 6]
    assert "1 of 7 rows are longer" in caplog.text


def test_an_evaluation_set_without_usable_rows_is_an_error(jsonl, tokenizer):
    with pytest.raises(DataError, match="none is left"):
        load_prompts(jsonl(numbered(3)), DataConfig(rollout_max_prompt_len=1), tokenizer)
