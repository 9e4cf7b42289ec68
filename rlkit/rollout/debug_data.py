"""A rollout as a file: what `--save-debug-rollout-data` writes and `--load-debug-rollout-data` trains on.

JSON lines, no pickle: a head line (`format`, `version`, `step`, `num_groups`), then one `SampleGroup` a line. Floats
are written with the shortest digits that read back as the same float, so a replay computes with the very same numbers.
"""

import math
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import orjson

from rlkit.observability.sample_files import well_formed
from rlkit.types.errors import DataError
from rlkit.types.samples import Prompt, Sample, SampleGroup, SampleStatus

_FORMAT = "rlkit-rollout"
_VERSION = 1


def rollout_path(template: str, step: int) -> Path:
    """The file of one step: `{rollout_id}` in the template becomes the step, if it is there."""
    return Path(template.replace("{rollout_id}", str(step)))


def save_rollout(path: Path, step: int, groups: list[SampleGroup]) -> None:
    """Write the groups; the file appears whole or not at all.

    Values of reward details and metadata that JSON does not have (a set, an array of a custom grader) are written as
    text, lone surrogates as `?`; an integer beyond 64 bits in a label is a DataError.
    """
    head = {"format": _FORMAT, "version": _VERSION, "step": step, "num_groups": len(groups)}
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.tmp")
    with unfinished.open("wb") as file:
        file.write(orjson.dumps(head, option=orjson.OPT_APPEND_NEWLINE))
        for group in groups:
            try:
                file.write(_to_line(group))
            except TypeError as error:
                place = f"group {group.group_id} (row {group.prompt.position} of the prompt file)"
                raise DataError(f"{path}: {place} cannot be written as JSON: {error}") from error
    os.replace(unfinished, path)


def _to_line(group: SampleGroup) -> bytes:
    option = orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS
    try:
        return orjson.dumps(group, default=str, option=option)
    except TypeError:  # most likely a lone surrogate, which a custom function may return
        return orjson.dumps(well_formed(asdict(group)), default=str, option=option)


def load_rollout(path: Path, *, vocab_size: int | None = None) -> tuple[int, list[SampleGroup]]:
    """(step it was generated in, groups), equal to what was saved. A DataError names the wrong file, line and field.
    `vocab_size`: of the model that trains on them, where it is known."""
    if not path.is_file():
        raise DataError(
            f"--load-debug-rollout-data: {path} does not exist; `{{rollout_id}}` in the path becomes the step"
        )
    with path.open("rb") as lines:
        head = _parse(path, 1, next(lines, b""))
        if head.get("format") != _FORMAT or head.get("version") != _VERSION:
            raise DataError(f"{path}: not a rollout of format {_FORMAT} version {_VERSION}: {str(head)[:200]}")
        for name in ("step", "num_groups"):
            if not _is_integer(head.get(name)) or head[name] < 0:
                raise DataError(f"{path}:1: {name} is {head.get(name)!r}, not a number of the head line")
        groups = [
            group_from_fields(_parse(path, number, line), f"{path}:{number}", vocab_size=vocab_size)
            for number, line in enumerate(lines, start=2)
        ]
    if len(groups) != head["num_groups"]:
        raise DataError(
            f"{path}: {len(groups)} groups, but the head line says {head['num_groups']}; the file is cut off"
        )
    return head["step"], groups


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        fields = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{path}:{number}: not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise DataError(f"{path}:{number}: not a JSON object: {fields!r:.80}")
    return cast("dict[str, Any]", fields)


def group_from_fields(fields: dict[str, Any], place: str, *, vocab_size: int | None = None) -> SampleGroup:
    """A group out of what `dataclasses.asdict` made of it; a DataError names `place`."""
    try:
        samples = [Sample(**{**sample, "status": SampleStatus(sample["status"])}) for sample in fields["samples"]]
        group = SampleGroup(group_id=fields["group_id"], prompt=Prompt(**fields["prompt"]), samples=samples)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{place}: not a sample group: {error!r}") from error
    for sample in group.samples:
        _check_fields(sample, place, vocab_size)
        _check_lengths(sample, place)
    return group


def _check_fields(sample: Sample, place: str, vocab_size: int | None) -> None:
    """DataError, which names `place`, the sample and the field, where a value cannot be trained on."""
    place = f"{place}: sample {sample.group_id}/{sample.index}"
    top = math.inf if vocab_size is None else vocab_size
    wanted = "a token id" if vocab_size is None else f"a token id below {vocab_size}, the size of the vocabulary"
    _check_each(f"{place}: tokens", sample.tokens, lambda token: _is_integer(token) and 0 <= token < top, wanted)
    _check_each(f"{place}: loss_mask", sample.loss_mask, lambda entry: entry in (0, 1), "0 or 1")
    _check_each(f"{place}: rollout_logprobs", sample.rollout_logprobs, _is_finite, "a finite number")
    if sample.reward is not None and not _is_finite(sample.reward):
        raise DataError(f"{place}: reward is {sample.reward!r}, not a finite number or null")
    if not _is_integer(sample.prompt_length) or not 0 <= sample.prompt_length <= len(sample.tokens):
        held = len(sample.tokens)
        raise DataError(f"{place}: prompt_length is {sample.prompt_length!r}, not an integer from 0 to {held} (tokens)")


def _check_each(what: str, values: Any, is_good: Callable[[Any], bool], wanted: str) -> None:
    if not isinstance(values, list):
        raise DataError(f"{what} is {values!r:.80}, not a list")
    for position, value in enumerate(cast("list[Any]", values)):
        if not is_good(value):
            raise DataError(f"{what}[{position}] is {value!r:.80}, not {wanted}")


def _is_integer(value: Any) -> bool:
    return type(value) is int


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _check_lengths(sample: Sample, place: str) -> None:
    """The invariant of a finished sample; a DataError names `place`, the sample and the lengths.

    A sample of given text (SFT) has no engine log-probs at all.
    """
    length = sample.response_length
    if len(sample.loss_mask) != length or len(sample.rollout_logprobs) not in (0, length):
        raise DataError(
            f"{place}: sample {sample.group_id}/{sample.index} has {length} response tokens, "
            f"{len(sample.loss_mask)} mask entries and {len(sample.rollout_logprobs)} log-probs; these must be equal"
        )
