"""Rows of a JSON Lines file by number, without holding them: an index of byte offsets, and one read per row.

Called by `prompts.py`. Opening a file reads it once, counting lines and hashing; a million rows of 300 bytes take about
a second, and 24 bytes of memory each. Invariants: rows are separated by `\\n` alone (an optional `\\r` before it is
white space), blank lines are no rows, and slices count rows as Python counts list items.
"""

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlkit.types.errors import DataError

SUFFIX = ".jsonl"

_CHUNK_BYTES = 8 << 20
_HEAD_BYTES = 1024
_NEWLINE = ord("\n")
_WHITE_SPACE = b" \t\r"
_BOM = b"\xef\xbb\xbf"
_WRONG_FORMATS = {
    b"\xff\xfe": "UTF-16 text; write it as UTF-8",
    b"\xfe\xff": "UTF-16 text; write it as UTF-8",
    b"\x1f\x8b": "compressed by gzip; unpack it first",
    b"PAR1": "a Parquet file; name it .parquet",
}
_SLICE = re.compile(r"(?P<path>.*)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]")


class JsonlRows:
    """The rows that `file.jsonl` or `file.jsonl@[start:stop]` names."""

    def __init__(self, path_and_slice: str) -> None:
        """Index the file. DataError when it is missing, of another format, or the slice is none."""
        path, rows = split_slice(path_and_slice)
        self.path = _existing_file(path)
        self._file = self.path.open("rb", buffering=0)
        starts, ends, lines, self.fingerprint = _index(self.path, self._file.fileno())
        self.num_rows_in_file = len(starts)
        """Rows without the slice."""
        self.start, self.stop, _ = rows.indices(len(starts))
        self._starts, self._ends, self._lines = starts[rows], ends[rows], lines[rows]

    def __len__(self) -> int:
        return len(self._starts)

    def place(self, position: int) -> str:
        """`file:line` of a row, for messages; the line as an editor counts it."""
        return f"{self.path}:{self._lines[position]}"

    def __getitem__(self, position: int) -> dict[str, Any]:
        """One row, parsed. DataError naming file and line when it is not a JSON object in UTF-8."""
        start, end = int(self._starts[position]), int(self._ends[position])
        raw = os.pread(self._file.fileno(), end - start, start)
        if len(raw) != end - start:
            raise DataError(f"{self.place(position)}: the file became shorter while it was in use")
        try:
            # NaN is not JSON, but table libraries write it for "missing": read as null.
            row = json.loads(raw.decode("utf-8"), parse_constant=lambda _: None)
        except UnicodeDecodeError as error:
            raise DataError(f"{self.place(position)}: not UTF-8 at byte {error.start} of the line") from error
        except json.JSONDecodeError as error:
            raise DataError(f"{self.place(position)}: not JSON: {error.msg} at column {error.colno}") from error
        except (RecursionError, ValueError) as error:  # nested too deeply, or a number of thousands of digits
            raise DataError(f"{self.place(position)}: cannot be read as JSON: {error}") from error
        if not isinstance(row, dict):
            raise DataError(f"{self.place(position)}: a row is a JSON object, this is a {type(row).__name__}")
        return row

    def close(self) -> None:
        self._file.close()


def split_slice(path_and_slice: str) -> tuple[str, slice]:
    """`file@[start:stop]` -> ("file", slice(start, stop)). Bounds may be missing or negative; steps are refused."""
    match = _SLICE.fullmatch(path_and_slice)
    if match is None:
        if "@[" in path_and_slice and path_and_slice.endswith("]"):
            _, _, wrong = path_and_slice.rpartition("@")
            raise DataError(
                f"{path_and_slice}: {wrong} is not a slice; write @[start:stop] with whole numbers, no step"
            )
        return path_and_slice, slice(None)
    start, stop = (int(match[bound]) if match[bound] else None for bound in ("start", "stop"))
    return match["path"], slice(start, stop)


def _existing_file(name: str) -> Path:
    path = Path(name).expanduser()
    if path.suffix != SUFFIX:
        remedy = "write one JSON object a line" if path.suffix == ".json" else f"convert it to JSON Lines ({SUFFIX})"
        raise DataError(
            f"{name}: only {SUFFIX} and .parquet files are read, optionally with a slice like @[0:100]; {remedy}"
        )
    if not path.exists():
        raise DataError(f"{name}: there is no such file (looked for {path.absolute()})")
    if not path.is_file():
        raise DataError(f"{name}: not a file")
    return path


def _index(path: Path, fd: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], str]:
    """(first byte, end byte, 1-based line number) of every row, and a hash of the whole content."""
    head = os.pread(fd, _HEAD_BYTES, 0)
    _refuse_other_formats(path, head)
    offset = len(_BOM) if head.startswith(_BOM) else 0
    digest = hashlib.sha256(head[:offset])
    starts: list[NDArray[np.int64]] = []
    breaks: list[NDArray[np.int64]] = []
    leads: list[NDArray[np.uint8]] = []  # the first byte of each line, to look closer at those that may be blank
    begins_line = True
    while chunk := os.pread(fd, _CHUNK_BYTES, offset):
        digest.update(chunk)
        data = np.frombuffer(chunk, dtype=np.uint8)
        here = np.flatnonzero(data == _NEWLINE)
        begins = np.concatenate(([0], here + 1)) if begins_line else here + 1
        begins_line = bool(data[-1] == _NEWLINE)
        begins = begins[:-1] if begins_line else begins  # that line begins with the next chunk, if there is one
        starts.append(begins + offset)
        breaks.append(here + offset)
        leads.append(data[begins])
        offset += len(data)
    if not starts:
        nothing = np.empty(0, dtype=np.int64)
        return nothing, nothing, nothing, digest.hexdigest()
    all_starts = np.concatenate(starts)
    all_ends = np.concatenate(breaks if begins_line else [*breaks, np.array([offset])])
    is_row = all_ends > all_starts
    spaces = np.frombuffer(_WHITE_SPACE, dtype=np.uint8)
    for line in np.flatnonzero(is_row & np.isin(np.concatenate(leads), spaces)):
        text = os.pread(fd, int(all_ends[line] - all_starts[line]), int(all_starts[line]))
        is_row[line] = bool(text.strip(_WHITE_SPACE))
    return all_starts[is_row], all_ends[is_row], np.flatnonzero(is_row) + 1, digest.hexdigest()


def _refuse_other_formats(path: Path, head: bytes) -> None:
    for magic, remedy in _WRONG_FORMATS.items():
        if head.startswith(magic):
            raise DataError(f"{path}: {remedy}")
    if head.removeprefix(_BOM).lstrip().startswith(b"["):
        raise DataError(f"{path}: holds a JSON array; write one JSON object a line")
