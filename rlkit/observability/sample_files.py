"""The few samples of a step that a person can look at later: `samples/step_0000012.json` in the run folder.

The rollout manager writes them (`rollout/sample_record.py` chooses), the report and `rlkit explain` read them. A long
response is kept as its beginning, which can be scored again, and its end, which holds the answer. The folder is
bounded: beyond `MAX_FOLDER_BYTES` every second of the older steps is deleted.
"""

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

FOLDER = "samples"
FORMAT = 1
MAX_FOLDER_BYTES = 64 * 1024 * 1024
HEAD_TOKENS = 384
"""Tokens at the beginning of a response that are kept."""
TAIL_TOKENS = 96
"""Tokens at the end of a longer one."""
MAX_PROMPT_TOKENS = 4096
"""A longer prompt is kept as text only, so its sample cannot be scored again."""
MAX_TEXT = 2000
"""Characters of a prompt's text, and of a label."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRun:
    """Consecutive tokens of a response; all lists are equally long, `gaps` may be empty."""

    start: int
    """Index of the first in the response."""
    ids: list[int]
    pieces: list[str]
    """Text of each token; where one is a part of a character, the character stands at its last part."""
    rollout_logprobs: list[float]
    """The engine's."""
    gaps: list[float] = field(default_factory=list[float])
    """Trainer's log-prob minus the engine's, under the weights that the step started with; 0 where masked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedSample:
    """One sample, cut to what is worth keeping."""

    group: int
    index: int
    seed: int
    kinds: list[str]
    """Why it was chosen: `best`, `worst`, `median`, `longest`, `largest gap`."""
    prompt: str
    prompt_ids: list[int]
    """Empty where the prompt is too long to keep."""
    label: str
    response_length: int
    """Tokens, all of them."""
    reward: float | None
    status: str
    weight_versions: list[int]
    mean_gap: float | None
    """Mean of |gap| over the whole response; None where nothing trained on it."""
    max_gap: float | None
    head: TokenRun
    tail: TokenRun | None

    @property
    def key(self) -> tuple[int, int]:
        return self.group, self.index


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSamples:
    """What is kept of one step."""

    step: int
    samples: list[RecordedSample]


def samples_path(run_dir: Path, step: int) -> Path:
    return run_dir / FOLDER / f"step_{step:07d}.json"


def write_samples(run_dir: Path, record: StepSamples) -> Path:
    """The file appears whole or not at all; an older one of the same step is replaced. Lone surrogates, which no file
    can hold, become `?`."""
    path = samples_path(run_dir, record.step)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_bytes(orjson.dumps({"format": FORMAT, **well_formed(asdict(record))}))
    os.replace(unfinished, path)
    return path


def well_formed(value: Any) -> Any:
    """The same lists, dicts and texts with `?` in place of lone surrogates: a custom function may return some."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {well_formed(key): well_formed(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [well_formed(item) for item in value]
    return value


def read_samples(path: Path) -> StepSamples:
    """ValueError, which names the file, when it is not one of ours."""
    try:
        document: dict[str, Any] = orjson.loads(path.read_bytes())
        if document["format"] != FORMAT:
            raise ValueError(f"format {document['format']}, this version reads {FORMAT}")
        return StepSamples(step=document["step"], samples=[_sample(fields) for fields in document["samples"]])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no recorded samples: {error!r}") from error


def sample_files(run_dir: Path) -> list[Path]:
    """Oldest step first."""
    return sorted((run_dir / FOLDER).glob("step_*.json"))


def thin_out(run_dir: Path, *, max_bytes: int = MAX_FOLDER_BYTES) -> list[Path]:
    """Delete every second file of the older steps until the folder fits; the newest stays. Returns what was deleted."""
    files = sample_files(run_dir)
    deleted: list[Path] = []
    while len(files) > 2 and sum(path.stat().st_size for path in files) > max_bytes:
        doomed = files[:-1][1::2]
        for path in doomed:
            path.unlink()
        deleted += doomed
        files = [path for path in files if path not in set(doomed)]
    return deleted


def _sample(fields: dict[str, Any]) -> RecordedSample:
    head, tail = fields.pop("head"), fields.pop("tail")
    return RecordedSample(head=TokenRun(**head), tail=None if tail is None else TokenRun(**tail), **fields)
