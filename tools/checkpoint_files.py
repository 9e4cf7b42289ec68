"""Reads a Hugging Face checkpoint a few rows at a time, and says what is to be written instead: for tools that convert
one (`checkpoint_writer.py` writes). Not a program itself.
"""

import json
import os
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

INDEX = "model.safetensors.index.json"
PIECE_BYTES = 8 * 1024**2
"""Of source data that one thread holds at a time."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
}
"""Those that are ever converted; any other is copied byte by byte."""
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1}


class ConversionError(Exception):
    """The source cannot be converted, or the result is not what it should be. The message is for people."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a tensor lies."""

    name: str
    dtype: str
    """In safetensors' words, e.g. `BF16`."""
    shape: tuple[int, ...]
    file: Path
    start: int
    """Byte in the file."""
    num_bytes: int

    @property
    def row_bytes(self) -> int:
        return self.num_bytes // self.shape[0] if self.shape and self.shape[0] else self.num_bytes

    @property
    def num_rows(self) -> int:
        return self.shape[0] if self.shape else 1


@dataclass(frozen=True, kw_only=True, slots=True)
class NewTensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


Write = Callable[[str, int, Tensor], None]
"""(tensor name, byte offset in the tensor, contiguous data)"""
Piece = Callable[[Write], None]
"""Reads some rows of one tensor, converts them, writes them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NewFile:
    """One file to be written."""

    name: str
    source: Path
    tensors: list[NewTensor] = field(default_factory=list[NewTensor])
    pieces: list[Piece] = field(default_factory=list[Piece])


class Reader:
    """Rows of tensors, read into memory that each thread uses again: what comes back is valid until the same thread
    reads under the same `slot` again."""

    def __init__(self) -> None:
        self._files: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._local = threading.local()
        self.num_bytes = 0

    def rows(self, place: Place, first: int, count: int, *, slot: str = "values") -> Tensor:
        """uint8, flat: rows [first, first + count)."""
        size = count * place.row_bytes
        buffer = self.buffer(slot, size)
        view = bytes_of(buffer)
        start = place.start + first * place.row_bytes
        done = 0
        while done < size:
            got = os.preadv(self._open(place.file), [view[done:]], start + done)
            if got == 0:
                raise ConversionError(f"{place.file} ends in the middle of {place.name}")
            done += got
        with self._lock:
            self.num_bytes += size
        return buffer

    def matrix(self, place: Place, first: int, count: int, *, slot: str = "values") -> Tensor:
        """The same in the tensor's dtype, [count, columns]."""
        return self.rows(place, first, count, slot=slot).view(DTYPES[place.dtype]).view(count, *place.shape[1:])

    def buffer(self, slot: str, size: int) -> Tensor:
        """uint8 [size] of this thread."""
        buffers: dict[str, Tensor] = self._local.__dict__.setdefault("buffers", {})
        if slot not in buffers or buffers[slot].numel() < size:
            buffers[slot] = torch.empty(max(size, PIECE_BYTES), dtype=torch.uint8)
        return buffers[slot][:size]

    def _open(self, path: Path) -> int:
        with self._lock:
            if path not in self._files:
                self._files[path] = os.open(path, os.O_RDONLY)
            return self._files[path]

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()


def bytes_of(data: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    array: Any = data.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def read_places(folder: Path) -> dict[str, Place]:
    """Every tensor of the checkpoint, from the headers of its safetensors files."""
    index = folder / INDEX
    if not (folder / "config.json").is_file():
        raise ConversionError(f"{folder} is no Hugging Face checkpoint: it has no config.json")
    if index.is_file():
        files = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    else:
        files = sorted(folder.glob("*.safetensors"))
    missing = [path.name for path in files if not path.is_file()]
    if missing or not files:
        raise ConversionError(f"{folder} is incomplete: {missing[0] if missing else 'a safetensors file'} is missing")
    places: dict[str, Place] = {}
    for path in files:
        places |= {place.name: place for place in read_header(path)[0]}
    return places


def read_header(path: Path) -> tuple[list[Place], dict[str, str]]:
    """(tensors in the order of their bytes, metadata)"""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    metadata = header.pop("__metadata__", {})
    places: list[Place] = []
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        place = Place(
            name=name,
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
            file=path,
            start=8 + length + start,
            num_bytes=end - start,
        )
        places.append(place)
    return sorted(places, key=lambda place: place.start), metadata


def row_ranges(place: Place, multiple: int = 1) -> Iterator[tuple[int, int]]:
    """(first, count) of consecutive rows of about `PIECE_BYTES`, each beginning at a multiple of `multiple`."""
    step = max(1, PIECE_BYTES // max(1, place.row_bytes * multiple)) * multiple
    for first in range(0, place.num_rows, step):
        yield first, min(step, place.num_rows - first)


def copied(reader: Reader, place: Place) -> tuple[NewTensor, list[Piece]]:
    """The tensor as it is."""

    def piece(first: int, count: int) -> Piece:
        return lambda write: write(place.name, first * place.row_bytes, reader.rows(place, first, count))

    new = NewTensor(name=place.name, dtype=place.dtype, shape=place.shape, num_bytes=place.num_bytes)
    return new, [piece(first, count) for first, count in row_ranges(place)] if place.num_bytes else []


def new_tensor(name: str, dtype: str, shape: tuple[int, ...]) -> NewTensor:
    return NewTensor(name=name, dtype=dtype, shape=shape, num_bytes=prod(shape) * ITEM_BYTES[dtype])


def run_tool(main: Callable[[], None], *errors: type[Exception]) -> None:
    """`main`, with errors for people in one line and exit status 1."""
    try:
        main()
    except (ConversionError, *errors) as error:
        sys.exit(f"error: {error}")


def compare(names: Iterable[str], differs: Callable[[str], str | None], title: str) -> None:
    """Ask `differs` about every tensor, count aloud, and raise ConversionError with the first that does."""
    names = list(names)
    found = [(name, problem) for name in names if (problem := differs(name)) is not None]
    if found:
        name, problem = found[0]
        raise ConversionError(f"{len(found)} of {len(names)} tensors are wrong; the first is {name}: {problem}")
    print(f"{title}: {len(names)} tensors verified", file=sys.stderr)
