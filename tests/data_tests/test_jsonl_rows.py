"""Lines, slices and formats of prompt files."""

import json

import numpy as np
import pytest

from rlkit.data import jsonl as jsonl_module
from rlkit.data.jsonl import JsonlRows, split_slice
from rlkit.types.errors import DataError


def rows_of(path: str) -> list[dict]:
    rows = JsonlRows(path)
    return [rows[position] for position in range(len(rows))]


def test_lines_end_at_newlines_only(case, jsonl):
    da01 = case("da-01")
    rows = rows_of(jsonl(da01["input"]["file_bytes_utf8"].encode("utf-8")))
    expected = da01["expected"]
    assert len(rows) == expected["rows"]
    assert [row["label"] for row in rows] == expected["labels"]
    assert chr(expected["row0_prompt_contains_codepoint"]) in rows[0]["prompt"]
    assert chr(expected["row1_prompt_contains_codepoint"]) in rows[1]["prompt"]


@pytest.mark.parametrize("character", "\u2028\u2029\u0085\x0b\x0c\x1c\x1d\x1e", ids=lambda c: f"U+{ord(c):04X}")
def test_other_line_breaks_stay_inside_strings(jsonl, character):
    raw = (
        json.dumps({"a": f"x{character}y"}, ensure_ascii=False)
        if ord(character) >= 0x80
        else json.dumps({"a": f"x{character}y"})
    )
    assert rows_of(jsonl((raw + "\n" + raw).encode())) == [{"a": f"x{character}y"}] * 2


def test_slices_are_those_of_a_list(case, jsonl):
    da02 = case("da-02")
    path = jsonl([{"id": n} for n in range(10)], "p.jsonl")
    for sliced, ids in zip(da02["input"]["paths"], da02["expected"]["ids"], strict=True):
        assert [row["id"] for row in rows_of(sliced.replace("p.jsonl", path))] == ids, sliced


@pytest.mark.parametrize("start", ["", "0", "3", "-4", "10", "25", "-25"])
@pytest.mark.parametrize("stop", ["", "0", "7", "-2", "10", "25", "-25"])
def test_every_slice_agrees_with_python_and_skips_blank_lines(jsonl, start, stop):
    path = jsonl(b"\n".join(f'{{"id": {n}}}\n   \t\r\n'.encode() for n in range(10)))
    expected = list(range(10))[slice(*(int(bound) if bound else None for bound in (start, stop)))]
    assert [row["id"] for row in rows_of(f"{path}@[{start}:{stop}]")] == expected


@pytest.mark.parametrize(
    "tail", ["[5]", "[0:10:2]", "[a:b]", "[1.5:3]", "[:", "[1:2]x", "[1:2].jsonl@[", "[]", "[--1:2]", "[1,2]"]
)
def test_what_is_no_slice_is_refused(jsonl, tail):
    path = jsonl([{"id": 0}])
    with pytest.raises(DataError, match=r"slice|only \.jsonl"):
        JsonlRows(f"{path}@{tail}")


def test_an_at_sign_elsewhere_in_the_path_is_part_of_it(tmp_path):
    folder = tmp_path / "run@[1:2]" / "me@home"
    folder.mkdir(parents=True)
    (folder / "p@v2.jsonl").write_text('{"id": 0}\n{"id": 1}\n')
    assert len(JsonlRows(str(folder / "p@v2.jsonl"))) == 2
    assert split_slice(f"{folder}/p@v2.jsonl@[1:]") == (f"{folder}/p@v2.jsonl", slice(1, None))


@pytest.mark.parametrize(
    "content, ids",
    [
        (b'\xef\xbb\xbf{"id": 0}\n{"id": 1}\n', [0, 1]),
        (b'{"id": 0}\r\n{"id": 1}\r\n', [0, 1]),
        (b'\n\n{"id": 0}\n \t \n{"id": 1}', [0, 1]),
        (b'  {"id": 0}  \n\t{"id": 1}\t\n', [0, 1]),
        (b"\r\n\r\n", []),
        (b"", []),
        (b'\xef\xbb\xbf\n{"id": 0}', [0]),
    ],
    ids=["bom", "crlf", "blank", "indented", "only blank", "empty", "bom alone on its line"],
)
def test_marks_and_white_space_are_no_content(jsonl, content, ids):
    assert [row["id"] for row in rows_of(jsonl(content))] == ids


def test_lines_are_found_across_chunk_borders(jsonl, monkeypatch):
    rows = [{"id": n, "pad": "ü" * (n % 7)} for n in range(50)]
    content = b"\n".join(json.dumps(row, ensure_ascii=False).encode() + b"\n  " for row in rows)
    path = jsonl(content)
    expected = JsonlRows(path).fingerprint
    for size in (1, 2, 3, 7, 64, 1000):
        monkeypatch.setattr(jsonl_module, "_CHUNK_BYTES", size)
        assert rows_of(path) == rows
        assert JsonlRows(path).fingerprint == expected


@pytest.mark.parametrize(
    "line, message",
    [
        (b'{"id": 1', r":4: not JSON"),
        (b"[1, 2]", r":4: a row is a JSON object, this is a list"),
        (b"7", r":4: a row is a JSON object, this is a int"),
        (b'{"a": "\xff"}', r":4: not UTF-8 at byte 7"),
        (b'{"a": 1} {"a": 2}', r":4: not JSON: Extra data at column 10"),
        (b"[" * 100_000 + b"]" * 100_000, r":4: cannot be read as JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", r":4: cannot be read as JSON"),
    ],
    ids=["cut off", "list", "number", "encoding", "two objects", "nesting", "huge integer"],
)
def test_a_broken_line_is_named_as_an_editor_counts_it(jsonl, line, message):
    rows = JsonlRows(jsonl(b'{"id": 0}\n\n{"id": 1}\n' + line + b'\n{"id": 2}\n'))
    with pytest.raises(DataError, match=r"prompts\.jsonl" + message):
        rows[2]
    assert rows[3] == {"id": 2}, "the others can be read"


def test_nan_is_read_as_null_and_integers_keep_all_digits(jsonl):
    assert rows_of(jsonl(b'{"a": NaN, "b": 123456789012345678901234567890, "c": 2.50}')) == [
        {"a": None, "b": 123456789012345678901234567890, "c": 2.5}
    ]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("p.json", b"[]", r"one JSON object a line"),
        ("p.parquet", b"PAR1", r"convert it to JSON Lines"),
        ("p.csv", b"a,b", r"only \.jsonl and \.parquet files"),
        ("p", b"{}", r"only \.jsonl and \.parquet files"),
        ("p.jsonl", b'[\n{"a": 1}\n]', r"holds a JSON array"),
        ("p.jsonl", "{}".encode("utf-16"), r"UTF-16"),
        ("p.jsonl", b"\x1f\x8b\x08\x00", r"gzip"),
        ("p.jsonl", b"PAR1\x15", r"Parquet"),
    ],
)
def test_other_formats_are_refused_with_a_remedy(jsonl, name, content, message):
    with pytest.raises(DataError, match=message):
        JsonlRows(jsonl(content, name))


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(DataError, match=r"no such file \(looked for /"):
        JsonlRows("nowhere/p.jsonl")
    (tmp_path / "d.jsonl").mkdir()
    with pytest.raises(DataError, match="not a file"):
        JsonlRows(str(tmp_path / "d.jsonl"))


def test_a_file_that_shrinks_is_noticed(jsonl, tmp_path):
    path = jsonl([{"id": n} for n in range(5)])
    rows = JsonlRows(path)
    with open(path, "r+b") as file:
        file.truncate(15)
    with pytest.raises(DataError, match="became shorter"):
        rows[4]


def test_many_rows_open_at_once_and_are_read_one_by_one(tmp_path):
    """The index holds numbers only: 300,000 rows take a fraction of a second and a few megabytes."""
    path = tmp_path / "many.jsonl"
    path.write_bytes(b"".join(b'{"id": %d, "prompt": "%s"}\n' % (n, b"x" * (n % 100)) for n in range(300_000)))
    rows = JsonlRows(str(path))
    index_bytes = sum(value.nbytes for value in vars(rows).values() if isinstance(value, np.ndarray))
    assert index_bytes <= 24 * 300_000
    assert [rows[n]["id"] for n in (0, 1, 150_000, 299_999)] == [0, 1, 150_000, 299_999]
