"""Checks of `rlkit doctor` about the folder of `--hf-checkpoint`: its files, its tokenizer, its chat template."""

import functools
import json
from pathlib import Path
from typing import Any

from rlkit.cli.doctor import Outcome, failed, ok, skipped, warning
from rlkit.config.checkpoint_files import config_problems, missing_shards, weight_problems
from rlkit.config.rules.paths import read_model_config
from rlkit.config.schema import ModelConfig, RunConfig
from rlkit.types.errors import DataError

NO_MODEL = "no --hf-checkpoint given"
ROUND_TRIP = "What is 12 + 30? It is 42."


def model_files(cfg: RunConfig) -> Outcome:
    """config.json can be read, every weight file that the index names is there, and none was cut off."""
    if not cfg.model.hf_checkpoint:
        return skipped(NO_MODEL)
    folder = Path(cfg.model.hf_checkpoint)
    if problems := config_problems(folder):
        return failed("; ".join(problems), "download the checkpoint again, or correct --hf-checkpoint")
    whole = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if "auto_map" in whole and not cfg.model.trust_remote_code:
        return failed(
            f"{folder} brings Python code of its own (auto_map in config.json)",
            "read it, then pass --trust-remote-code; or use a checkpoint of an architecture that transformers has",
        )
    broken = broken_weights(folder)
    if broken:
        return failed("; ".join(broken), "download these files again")
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        return failed(f"{folder} holds no *.safetensors", "convert or download the checkpoint in safetensors")
    return ok(f"{whole.get('model_type')}, {len(found)} weight file{'s' * (len(found) > 1)}, none cut off")


def broken_weights(folder: Path) -> list[str]:
    """Weight files that are missing, cut off or no safetensors."""
    return [*missing_shards(folder), *weight_problems(folder)]


def tokenizer(cfg: RunConfig) -> Outcome:
    """It loads, a text comes back as it went in, and its ids are the model's."""
    if not cfg.model.hf_checkpoint:
        return skipped(NO_MODEL)
    try:
        loaded = loaded_tokenizer(cfg.model)
    except DataError as error:
        return failed(str(error), "download the tokenizer's files again (tokenizer.json, tokenizer_config.json)")
    ids = loaded.encode(ROUND_TRIP, add_special_tokens=False)
    model = read_model_config(cfg.model.hf_checkpoint) or {}
    vocab = model.get("vocab_size")
    if isinstance(vocab, int) and max(ids, default=0) >= vocab:
        return failed(
            f"the tokenizer gives id {max(ids)}, the model has {vocab} rows",
            "take the tokenizer that belongs to the model",
        )
    if loaded.eos_token_id is None:
        return warning(
            "no end-of-sequence token", "set eos_token in tokenizer_config.json, or pass --rollout-stop-token-ids"
        )
    back = loaded.decode(ids)
    if back.strip() != ROUND_TRIP:
        return warning(
            f"{ROUND_TRIP!r} comes back as {back.strip()!r}", "a small vocabulary may be meant so; else download again"
        )
    return ok(f"{len(ids)} tokens there and back, end of sequence {loaded.eos_token_id}")


def chat_template(cfg: RunConfig) -> Outcome:
    """It renders a conversation with a generation prompt."""
    if not cfg.model.hf_checkpoint:
        return skipped(NO_MODEL)
    try:
        loaded = loaded_tokenizer(cfg.model)
    except DataError:
        return skipped("no tokenizer")
    if loaded.chat_template is None:
        if cfg.data.apply_chat_template:
            return failed("--apply-chat-template is set and there is none", "drop the flag, or add chat_template.jinja")
        return ok("none; prompts are taken as they are")
    from jinja2 import TemplateError  # local: transformers has loaded it by now

    messages = [{"role": "user", "content": "2 + 2?"}]
    try:
        text = loaded.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **cfg.data.apply_chat_template_kwargs
        )
    except (TemplateError, ValueError, TypeError) as error:
        return failed(
            f"it does not render a question: {error}", "correct chat_template.jinja or --apply-chat-template-kwargs"
        )
    if "2 + 2?" not in text:
        return failed("it leaves the question out", "correct chat_template.jinja")
    return ok(f"a question becomes {len(text)} characters, ending in {text[-20:]!r}")


@functools.lru_cache(maxsize=1)
def loaded_tokenizer(model: ModelConfig) -> Any:
    """Loaded once for both checks."""
    from rlkit.data.tokenizer import load_tokenizer  # local: transformers

    return load_tokenizer(model)
