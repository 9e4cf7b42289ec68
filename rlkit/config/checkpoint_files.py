"""What the files of a Hugging Face checkpoint must hold before anything reads them further: `config.json` and the
headers of the safetensors files. Without torch.
"""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from rlkit.config.errors import ConfigError

DENSE_DECODERS = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose parameters can be counted from their config.json."""

INDEX = "model.safetensors.index.json"

_COUNTED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
_LENGTH_BYTES = 8
_LFS_POINTER = b"version https://git-lfs"
_REMEDY = "download it again"


def read_safetensors_header(path: Path) -> dict[str, dict[str, Any]]:
    """Tensor name -> its entry (`dtype`, `shape`, `data_offsets`), without the metadata.

    A file begins with the length of its JSON header, 8 bytes, which is held against the size of the file before it is
    believed. ConfigError that names the file where it is empty, a Git LFS pointer, cut off, or something else.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(len(_LFS_POINTER))
            if size == 0:
                raise ConfigError(f"{path} is empty; {_REMEDY}")
            if start == _LFS_POINTER:
                raise ConfigError(f"{path} is a Git LFS pointer, not the weights; run `git lfs pull` in its folder")
            if size <= _LENGTH_BYTES:
                raise ConfigError(f"{path} was cut off: it ends after {size} bytes; {_REMEDY}")
            if start[_LENGTH_BYTES : _LENGTH_BYTES + 1] != b"{":
                raise ConfigError(f"{path} is no safetensors file: it has no header; {_REMEDY}")
            (length,) = struct.unpack("<Q", start[:_LENGTH_BYTES])
            if _LENGTH_BYTES + length > size:
                raise ConfigError(
                    f"{path} was cut off: {size:,} of at least {_LENGTH_BYTES + length:,} bytes; {_REMEDY}"
                )
            file.seek(_LENGTH_BYTES)
            header = json.loads(file.read(length))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; correct its permissions, or {_REMEDY}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no safetensors file: its header is not JSON ({error}); {_REMEDY}") from error
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    for name, entry in tensors.items():
        if not _is_entry(entry):
            raise ConfigError(f"{path} is no safetensors file: {name} has no shape and data_offsets; {_REMEDY}")
    end = _LENGTH_BYTES + length + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    if size < end:
        raise ConfigError(f"{path} was cut off: {size:,} of {end:,} bytes; {_REMEDY}")
    return tensors


def config_problems(folder: Path) -> list[str]:
    """What is wrong with a config.json that is there, naming file and field."""
    path = folder / "config.json"
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        return [f"{path} cannot be read: {error.strerror}; correct its permissions"]
    except (ValueError, RecursionError) as error:
        return [f"{path} is not JSON ({error}); {_REMEDY}"]
    if not isinstance(whole, dict):
        return [f"{path} holds a {type(whole).__name__}, not an object with model_type; {_REMEDY}"]
    config = cast("dict[str, Any]", whole)
    if not isinstance(config.get("model_type"), str):
        return [f"{path} has no model_type; {_REMEDY}, or correct the flag that names its folder"]
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        return [f"{path}: text_config is a {type(text).__name__}, not an object; {_REMEDY}"]
    return [f"{path}: {problem}; {_REMEDY}" for problem in _field_problems(cast("dict[str, Any]", text))]


def weight_problems(folder: Path) -> list[str]:
    """Of the safetensors files that are there."""
    found: list[str] = []
    for path in sorted(folder.glob("*.safetensors")):
        try:
            read_safetensors_header(path)
        except ConfigError as error:
            found.append(str(error))
    return found


def missing_shards(folder: Path) -> list[str]:
    """Files that the index names and that are not there."""
    index = folder / INDEX
    if not index.is_file():
        return []
    try:
        named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{index} cannot be read ({error!r}); {_REMEDY}"]
    return [
        f"{name} is named by {index} and not there; download it"
        for name in sorted(named)
        if not (folder / name).is_file()
    ]


def _field_problems(config: Mapping[str, Any]) -> list[str]:
    is_dense = config.get("model_type") in DENSE_DECODERS
    found: list[str] = []
    for name in _COUNTED:
        value = config.get(name)
        if value is None:
            found += [f"{name} is missing"] if is_dense else []
        elif is_dense and not (isinstance(value, int) and value >= 1):
            found.append(f"{name} = {json.dumps(value)} is not a whole number above 0")
    return found


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict):
        return False
    named = cast("dict[str, Any]", entry)
    shape, offsets = named.get("shape"), named.get("data_offsets")
    return (
        isinstance(shape, list)
        and isinstance(offsets, list)
        and len(cast("list[Any]", offsets)) == 2
        and all(isinstance(number, int) for number in cast("list[Any]", shape + offsets))
    )
