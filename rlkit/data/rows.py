"""Rows of a prompt file by number, whatever its format. Called by `prompts.py`."""

from typing import Any, Protocol

from rlkit.data.jsonl import JsonlRows, split_slice
from rlkit.data.parquet import SUFFIX as PARQUET_SUFFIX
from rlkit.data.parquet import ParquetRows


class Rows(Protocol):
    """What `JsonlRows` and `ParquetRows` are."""

    fingerprint: str
    """A hash of the file's content."""
    num_rows_in_file: int
    start: int
    stop: int

    def __len__(self) -> int: ...

    def __getitem__(self, position: int) -> dict[str, Any]: ...

    def place(self, position: int) -> str: ...

    def close(self) -> None: ...


def open_rows(path_and_slice: str) -> Rows:
    """The rows that a path with its slice names. DataError where it cannot be read."""
    path, _ = split_slice(path_and_slice)
    return ParquetRows(path_and_slice) if path.endswith(PARQUET_SUFFIX) else JsonlRows(path_and_slice)
