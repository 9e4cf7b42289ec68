"""Prompt files in Parquet; asked where pyarrow is installed."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from rlkit.data.jsonl import JsonlRows
from rlkit.data.parquet import BATCH_ROWS, ParquetRows
from rlkit.data.rows import open_rows
from rlkit.types.errors import DataError


def test_without_pyarrow_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import sys

    (tmp_path / "p.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"rlkit\[parquet\]"):
        ParquetRows(str(tmp_path / "p.parquet"))


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(DataError, match="no such file"):
        open_rows(str(tmp_path / "p.parquet"))


def make_rows(count: int) -> list[dict[str, Any]]:
    return [
        {
            "input": [{"role": "user", "content": f"{number}+{number}="}],
            "label": str(2 * number),
            "metadata": {"level": number % 3} if number % 2 else {"hint": "x"},
        }
        for number in range(count)
    ]


@pytest.mark.parametrize("rows_of_a_group", [700, 10_000])
def test_rows_are_those_of_jsonl_in_any_order(tmp_path: Path, rows_of_a_group: int):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = make_rows(3 * BATCH_ROWS + 17)
    path, lines = tmp_path / "p.parquet", tmp_path / "p.jsonl"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=rows_of_a_group)
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found, expected = open_rows(str(path)), JsonlRows(str(lines))
    assert len(found) == len(expected) == len(rows) and isinstance(found, ParquetRows)
    order = list(range(len(rows)))
    random.Random(0).shuffle(order)
    assert [found[place] for place in order] == [expected[place] for place in order]
    sliced = open_rows(f"{path}@[-20:-3]")
    assert [sliced[place] for place in range(len(sliced))] == rows[-20:-3]
    assert sliced.place(0) == f"{path}:{len(rows) - 20 + 1}" and sliced.fingerprint == found.fingerprint
    found.close()


def test_what_is_no_parquet_file_is_refused(tmp_path: Path):
    pytest.importorskip("pyarrow")
    (tmp_path / "p.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match="no Parquet file"):
        ParquetRows(str(tmp_path / "p.parquet"))
