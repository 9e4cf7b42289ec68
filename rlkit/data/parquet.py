"""Rows of a Parquet file by number, without holding them. Called by `rows.py`; needs pyarrow (`pip install
'rlkit[parquet]'`).

Parquet can be read from front to back only, in row groups that may hold all of the file. So a row group of which a row
is wanted is unpacked once into a file of Arrow batches that has no name any more, and mapped: rows at random cost a
look into the page cache and no memory of the process. The first rows come straight from the Parquet file, so that
opening it unpacks nothing.
"""

import bisect
import hashlib
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

from rlkit.data.jsonl import split_slice
from rlkit.types.errors import DataError

SUFFIX = ".parquet"
BATCH_ROWS = 1024
_CHUNK_BYTES = 8 << 20


class ParquetRows:
    """The rows that `file.parquet` or `file.parquet@[start:stop]` names; as `JsonlRows`."""

    def __init__(self, path_and_slice: str) -> None:
        """Read the file's outline. DataError when it is missing, no Parquet file, or pyarrow is not installed."""
        name, rows = split_slice(path_and_slice)
        self.path = Path(name).expanduser()
        if not self.path.is_file():
            raise DataError(f"{name}: there is no such file (looked for {self.path.absolute()})")
        self._arrow, parquet = _pyarrow(name)
        try:
            self._file = parquet.ParquetFile(self.path, memory_map=True)
        except (self._arrow.ArrowInvalid, OSError) as error:
            raise DataError(f"{self.path}: no Parquet file that can be read: {error}") from error
        outline = self._file.metadata
        self.num_rows_in_file = int(outline.num_rows)
        self.start, self.stop, _ = rows.indices(self.num_rows_in_file)
        self.fingerprint = _hash(self.path)
        self._group_starts = [0]
        for group in range(outline.num_row_groups):
            self._group_starts.append(self._group_starts[-1] + outline.row_group(group).num_rows)
        self._groups: dict[int, _UnpackedGroup] = {}
        self._first: list[dict[str, Any]] | None = None

    def __len__(self) -> int:
        return max(0, self.stop - self.start)

    def place(self, position: int) -> str:
        """`file:row` of a row, counted from 1, for messages."""
        return f"{self.path}:{self.start + position + 1}"

    def __getitem__(self, position: int) -> dict[str, Any]:
        """One row. Fields of nested objects that are null are left out: Parquet has no other word for absent."""
        number = self.start + position
        if number < BATCH_ROWS and 0 not in self._groups:
            first = self._first
            if first is None:
                first = self._first = next(self._file.iter_batches(batch_size=BATCH_ROWS)).to_pylist()
            if number < len(first):
                return _row(first[number])
        group = bisect.bisect_right(self._group_starts, number) - 1
        if group not in self._groups:
            self._groups[group] = _UnpackedGroup(self._file, group, self._arrow)
        return _row(self._groups[group].row(number - self._group_starts[group]))

    def close(self) -> None:
        self._groups.clear()
        self._file.close()


class _UnpackedGroup:
    """A row group as Arrow batches in a mapped file."""

    def __init__(self, file: Any, group: int, arrow: Any) -> None:
        self._starts = [0]
        with tempfile.NamedTemporaryFile(prefix="rlkit-rows-") as unpacked:
            with arrow.OSFile(unpacked.name, "wb") as sink, arrow.ipc.new_file(sink, file.schema_arrow) as writer:
                for batch in file.iter_batches(batch_size=BATCH_ROWS, row_groups=[group]):
                    writer.write_batch(batch)
                    self._starts.append(self._starts[-1] + batch.num_rows)
            self._batches = arrow.ipc.open_file(arrow.memory_map(unpacked.name))  # outlives the name

    def row(self, number: int) -> dict[str, Any]:
        batch = bisect.bisect_right(self._starts, number) - 1
        return self._batches.get_batch(batch).slice(number - self._starts[batch], 1).to_pylist()[0]


def _row(row: dict[str, Any]) -> dict[str, Any]:
    return {name: _without_nulls(value) for name, value in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _pyarrow(name: str) -> tuple[Any, Any]:
    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        raise DataError(
            f"{name}: Parquet files need pyarrow, which is not installed ({error}); pip install 'rlkit[parquet]', or "
            "convert the file to JSON Lines"
        ) from error
