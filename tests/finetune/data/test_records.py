"""Records from files: both forms, plain and compressed, with the line each is on."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openelm_mlx.finetune.data.records import DataError, Record, Records

VALUES = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)
RECORDS = st.lists(st.dictionaries(st.text(), VALUES, max_size=3), max_size=5)


def read(path: Path, data: bytes, start: int = 0) -> list[Record]:
    path.write_bytes(data)
    return list(Records(path, start=start))


def values(records: list[Record]) -> list[dict[str, Any]]:
    return [record.values for record in records]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records") / "my.data"


@given(records=RECORDS, indent=st.sampled_from([None, 0, 2]), escaped=st.booleans(), packed=st.booleans())
def test_an_array_gives_its_entries_each_with_its_line(
    path: Path, records: list[dict[str, Any]], indent: int | None, escaped: bool, packed: bool
) -> None:
    text = json.dumps(records, indent=indent, ensure_ascii=escaped)
    data = text.encode("utf-8", "surrogatepass")
    got = read(path, gzip.compress(data) if packed else data)
    assert values(got) == records
    lines = [int(record.where.split(":")[-1].split(" ")[0]) for record in got]
    # An entry's line is one more than the line ends before it, and json.dumps puts each on a line of its own if any.
    sizes = [json.dumps(record, indent=indent).count("\n") for record in records]
    expected = [1 if indent is None else 2 + sum(sizes[:n]) + n for n in range(len(records))]
    assert lines == expected
    assert [record.where.split(" ")[1:] for record in got] == [["(entry", f"{n + 1})"] for n in range(len(got))]


@given(records=RECORDS, blank=st.sampled_from([b"", b"\n", b" \r\n"]), end=st.sampled_from([b"\n", b"\r\n"]))
def test_lines_give_their_objects_each_with_its_line(
    path: Path, records: list[dict[str, Any]], blank: bytes, end: bytes
) -> None:
    data = b"".join(blank + json.dumps(record).encode() + end for record in records)
    got = read(path, data)
    assert values(got) == records
    assert read(path, gzip.compress(data)) == got == read(path, data.removesuffix(end))
    step = 2 if blank else 1
    assert [record.where for record in got] == [f"{path}:{step * (n + 1)}" for n in range(len(records))]


def test_a_byte_order_mark_is_left_aside(path: Path) -> None:
    for data in (b'{"a": 1}\n', b'[{"a": 1}]'):
        assert values(read(path, b"\xef\xbb\xbf" + data)) == [{"a": 1}]
        assert values(read(path, gzip.compress(b"\xef\xbb\xbf" + data))) == [{"a": 1}]


def test_an_array_may_begin_after_blank_lines(path: Path) -> None:
    assert read(path, b'\n \n [\n{"a": 1}\n,\n\n{"a":\n2},{"a": 3}]\n\n') == [
        Record(f"{path}:4 (entry 1)", {"a": 1}),
        Record(f"{path}:7 (entry 2)", {"a": 2}),
        Record(f"{path}:8 (entry 3)", {"a": 3}),
    ]


def test_line_separators_of_unicode_end_no_line(path: Path) -> None:
    got = read(path, '{"a": "x\u2028y\x85z"}\n{"a": 1}\n'.encode())
    assert [record.where for record in got] == [f"{path}:1", f"{path}:2"]


def test_several_gzip_members_are_one_file(path: Path) -> None:
    assert values(read(path, gzip.compress(b'{"a": 1}\n{"a"') + gzip.compress(b": 2}\n"))) == [{"a": 1}, {"a": 2}]


def test_a_bad_line_is_a_record_with_a_problem_and_reading_goes_on(path: Path) -> None:
    got = read(path, b'{"a": 1}\nx\n\xff\n7\n{"a": 2}\n')
    assert values(got) == [{"a": 1}, {}, {}, {}, {"a": 2}]
    assert [bool(record.problem) for record in got] == [False, True, True, True, False]
    got = read(path, b'[{"a": 1}, [1], {"a": 2}]')
    assert [record.problem for record in got] == ["", "a JSON object is needed, not an array", ""]


@pytest.mark.parametrize("as_array", [False, True])
def test_reading_goes_on_from_a_position(path: Path, as_array: bool) -> None:
    records = [{"a": n} for n in range(5)]
    data = json.dumps(records).encode() if as_array else b"\n".join(json.dumps(r).encode() for r in records)
    whole = read(path, data)
    reader = Records(path)
    first = [next(reader), next(reader)]
    assert reader.position == 2
    reader.close()
    assert first + read(path, data, start=2) == whole
    assert read(path, data, start=5) == []
    with pytest.raises(DataError, match="has 5 records, so none can be read from number 6 on"):
        Records(path, start=6)


def test_lines_are_read_one_after_another(path: Path) -> None:
    path.write_bytes(b'{"text": "some words"}\n' * 50_000 + b"x\n")
    reader = Records(path)
    assert (reader.done, reader.total) == (0, path.stat().st_size)
    seen = [reader.done for _ in zip(range(40_000), reader, strict=False)]
    assert seen == sorted(seen)
    assert seen[0] < reader.total / 10 < reader.done < reader.total
    assert sum(1 for _ in reader) == 50_001 - 40_000
    assert reader.done == reader.total


def test_a_file_that_may_not_be_read_or_is_none(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.jsonl: no such file"):
        Records(tmp_path / "absent.jsonl")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="pipe: is no regular file"):
        Records(tmp_path / "pipe")
