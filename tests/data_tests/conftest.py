"""Tokenizers and prompt files built in code: nothing is downloaded."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast
from word_tokenizer import word_tokenizer

CASES = Path(__file__).parents[1] / "data" / "cases.jsonl"


@pytest.fixture(scope="session")
def case() -> Callable[[str], dict]:
    """A recorded bug case by its id."""
    cases = [json.loads(line) for line in CASES.read_text(encoding="utf-8").split("\n") if line]
    return {each["id"]: each for each in cases}.__getitem__


CHAT = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}[end]{% endfor %}"
    "{% if tools %}[tool]{{ tools | length }}{% endif %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    words = ["[user]", "[assistant]", "[end]", "[tool]", *(f"w{n}" for n in range(200)), *map(str, range(10))]
    return word_tokenizer({word: place for place, word in enumerate(words, 3)}, template=CHAT, bos=True)


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., str]:
    """Write rows (or raw bytes) to a file and return its path."""

    def write(rows: list[dict] | bytes, name: str = "prompts.jsonl") -> str:
        path = tmp_path / name
        content = rows if isinstance(rows, bytes) else "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(content)
        return str(path)

    return write
