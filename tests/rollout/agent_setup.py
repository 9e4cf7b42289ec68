"""A chat model for agents without weights: a tokenizer that joins `42` into one token, and a chat template."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

END = 1
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz +-*=?.,:;<>/{}[]_\"'\n|ABCDEFGHIJKLMNOPQRSTUVWXYZ"
SPECIAL = ["<pad>", "<end>", "<user>", "<assistant>", "<tool>", "<system>"]
VOCABULARY = [*SPECIAL, *CHARACTERS, "42"]
TEMPLATE = """\
{%- for message in messages -%}
{{- '<' + message['role'] + '>' + message['content'] -}}
{%- for call in message['tool_calls'] or [] -%}
{{- '<tool_call>{"name": "' + call['function']['name'] + '", "arguments": ' -}}
{{- call['function']['arguments'] | tojson + '}</tool_call>' -}}
{%- endfor -%}
{{- '<end>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<assistant>' -}}{%- endif -%}"""
THINKING_TEMPLATE = TEMPLATE.replace(
    "message['content'] -}}",
    "(message['content'] if loop.last else message['content'].split('[/think]')[-1]) -}}",
)
"""Drops the thinking of earlier replies, as Qwen3's does."""
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'


def chat_tokenizer(template: str = TEMPLATE) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocab = {token: number for number, token in enumerate(VOCABULARY)}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[("4", "2")], unk_token="<pad>"))
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<end>", pad_token="<pad>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = template
    return tokenizer


def spell(ids: list[int]) -> str:
    return "".join(VOCABULARY[token] for token in ids)


def letters(text: str) -> list[int]:
    """A token a character: not what the tokenizer makes of `42`."""
    return [VOCABULARY.index(character) for character in text]


def write_checkpoint(folder: Path, *, template: str = TEMPLATE, context: int = 1024) -> Path:
    chat_tokenizer(template).save_pretrained(folder)
    (folder / "config.json").write_text(
        json.dumps({"model_type": "x", "max_position_embeddings": context, "eos_token_id": END})
    )
    return folder


def speaks(answer: Callable[[str], str]) -> Callable[[dict[str, Any]], tuple[list[int], str]]:
    """Speech of an engine that says `answer(what it was given, as text)`, letter by letter, and ends its turn."""

    def speak(body: dict[str, Any]) -> tuple[list[int], str]:
        text = answer(spell(body["input_ids"]))
        return [*letters(text), END], text

    return speak


def calculating(said: str) -> str:
    """Asks the calculator once, then answers."""
    return "42" if "<tool>" in said else CALL
