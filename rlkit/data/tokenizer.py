"""The tokenizer of a checkpoint folder, and the ids that end its responses. Called by the rollout manager and by tools.

The only module of this layer that knows transformers; others see the protocol.
"""

import json
from pathlib import Path
from typing import Any, Protocol, cast

from rlkit.config.schema import ModelConfig
from rlkit.types.errors import DataError


class Tokenizer(Protocol):
    """What rlkit uses of a transformers tokenizer."""

    bos_token: str | None
    bos_token_id: int | None
    eos_token_id: int | None
    chat_template: str | dict[str, str] | None
    all_special_ids: list[int]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str: ...

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> Any: ...


def load_tokenizer(model: ModelConfig) -> Tokenizer:
    """The tokenizer in the folder of `--hf-checkpoint`. DataError when there is none; nothing is downloaded."""
    from transformers import AutoTokenizer  # here: seconds of import that graders and tests of other parts do not need

    folder = _checkpoint_folder(model)
    try:
        loaded = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=model.trust_remote_code
        )
    except (OSError, ValueError, ImportError, KeyError, AttributeError) as error:
        files = ", ".join(sorted(path.name for path in folder.iterdir() if "token" in path.name)) or "none"
        raise DataError(
            f"{folder}: no tokenizer could be loaded (tokenizer files there: {files}); "
            f"--hf-checkpoint needs at least tokenizer.json and tokenizer_config.json. {type(error).__name__}: {error}"
        ) from error
    return cast(Tokenizer, loaded)


def eos_token_ids(model: ModelConfig, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids that end a response, ascending: those of `generation_config.json`, else of `config.json`, and the
    tokenizer's.

    Chat models end a turn with one id and a document with another, and only generation_config.json lists both.
    """
    folder = _checkpoint_folder(model)
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        if ids := _eos_of(folder / name):
            found.update(ids)
            break
    if tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    if not found:
        raise DataError(
            f"{folder}: no end-of-sequence id in generation_config.json, config.json or the tokenizer; add eos_token_id"
        )
    return tuple(sorted(found))


def _checkpoint_folder(model: ModelConfig) -> Path:
    folder = Path(model.hf_checkpoint).expanduser()
    if not folder.is_dir():
        raise DataError(
            f"--hf-checkpoint {model.hf_checkpoint}: there is no such folder (looked for {folder.absolute()})"
        )
    return folder


def _eos_of(path: Path) -> list[int]:
    if not path.is_file():
        return []
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: not JSON: {error}") from error
    config = value.get("text_config", value) if isinstance(value, dict) else {}
    ids = value.get("eos_token_id", config.get("eos_token_id")) if isinstance(value, dict) else None
    return [ids] if isinstance(ids, int) else [item for item in ids or [] if isinstance(item, int)]
