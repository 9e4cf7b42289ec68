"""Loading a tokenizer, its end-of-sequence ids, and supervised samples."""

import json

import pytest
from word_tokenizer import word_tokenizer

from rlkit.config.schema import DataConfig, ModelConfig
from rlkit.data.prompts import PromptSource
from rlkit.data.sft import fill_in_label, turn_end_id
from rlkit.data.tokenizer import eos_token_ids, load_tokenizer
from rlkit.types.errors import DataError
from rlkit.types.samples import Sample, SampleStatus


@pytest.fixture
def checkpoint(tmp_path, tokenizer) -> ModelConfig:
    tokenizer.save_pretrained(tmp_path)
    return ModelConfig(hf_checkpoint=str(tmp_path))


def test_a_saved_tokenizer_is_loaded_as_it_was(checkpoint, tokenizer):
    loaded = load_tokenizer(checkpoint)
    messages = [{"role": "user", "content": "w1 w2"}]
    assert loaded.encode("w1 [end] w7") == tokenizer.encode("w1 [end] w7")
    assert loaded.apply_chat_template(messages, tokenize=False) == tokenizer.apply_chat_template(
        messages, tokenize=False
    )


def test_a_missing_folder_or_tokenizer_is_named(tmp_path):
    with pytest.raises(DataError, match=r"--hf-checkpoint nowhere: there is no such folder"):
        load_tokenizer(ModelConfig(hf_checkpoint="nowhere"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer files there: none"):
        load_tokenizer(ModelConfig(hf_checkpoint=str(tmp_path)))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match=r"no tokenizer could be loaded"):
        load_tokenizer(ModelConfig(hf_checkpoint=str(tmp_path)))


@pytest.mark.parametrize(
    "generation, config, expected",
    [
        ({"eos_token_id": [5, 9]}, {"eos_token_id": 7}, (2, 5, 9)),
        ({"eos_token_id": 5}, {}, (2, 5)),
        ({}, {"eos_token_id": 7}, (2, 7)),
        (None, {"eos_token_id": [7, 8]}, (2, 7, 8)),
        (None, {"text_config": {"eos_token_id": 7}}, (2, 7)),
        (None, None, (2,)),
    ],
    ids=["generation config", "single id", "config behind it", "config", "nested config", "tokenizer"],
)
def test_end_of_sequence_ids_come_from_the_first_file_that_has_them(tmp_path, checkpoint, generation, config, expected):
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    assert eos_token_ids(checkpoint, load_tokenizer(checkpoint)) == expected


def sft_sample_of(row: dict, tokenizer, jsonl, **cfg) -> Sample:
    source = PromptSource(DataConfig(prompt_data=jsonl([row]), label_key="label", **cfg), tokenizer)
    (prompt,) = source.next(1)
    sample = Sample(group_id=3, index=0, seed=1, tokens=[], prompt_length=0, metadata=prompt.metadata)
    fill_in_label(sample, prompt, tokenizer)
    return sample


@pytest.mark.parametrize("label, words", [("w2 w3", ["w2", "w3"]), (7, ["7"])])
def test_a_label_becomes_the_response_and_ends_its_turn(jsonl, tokenizer, label, words):
    sample = sft_sample_of({"input": "w1", "label": label}, tokenizer, jsonl, apply_chat_template=True)
    prompt_words = ["[user]", "w1", "[end]", "[assistant]"]
    assert sample.tokens == tokenizer.convert_tokens_to_ids([*prompt_words, *words, "[end]"])
    assert (sample.prompt_length, sample.response_length) == (4, len(words) + 1)
    assert sample.loss_mask == [1] * sample.response_length
    assert (sample.status, sample.reward, sample.group_id) == (SampleStatus.COMPLETED, 0.0, 3)
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "w1"}, {"role": "assistant", "content": str(label)}], tokenize=False
    )
    assert sample.tokens == tokenizer.encode(rendered, add_special_tokens=False), "what the template makes of both"


def test_without_a_template_the_response_ends_with_eos(jsonl):
    tokenizer = word_tokenizer({"w1": 3, "w2": 4}, template=None, bos=True)
    sample = sft_sample_of({"input": "w1", "label": "w2"}, tokenizer, jsonl)
    assert sample.tokens == [1, 3, 4, 2]


def test_a_template_that_marks_no_end_falls_back_to_eos():
    template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    assert turn_end_id(word_tokenizer({"w1": 3}, template=template, bos=False)) == 2


@pytest.mark.parametrize("label", [None, "", True, ["w1"], {"a": 1}])
def test_a_label_that_is_no_text_is_refused(jsonl, tokenizer, label):
    with pytest.raises(DataError, match=r"row 0 .*--label-key"):
        sft_sample_of({"input": "w1", "label": label}, tokenizer, jsonl)
