"""Texts of files of every kind."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from openelm_mlx.finetune.data.records import DataError
from openelm_mlx.finetune.data.textfiles import Texts

TEXTS = ["Alice was", "beginning\nto get", "very tired"]


def read(path: Path, start: int = 0, key: str = "text") -> list[str]:
    return [record.values["text"] if not record.problem else record.problem for record in Texts(path, key, start=start)]


def lines(key: str = "text") -> bytes:
    return b"".join(json.dumps({key: text, "id": 1}).encode() + b"\n" for text in TEXTS)


def parquet(path: Path, rows: list[str | None], group: int = 2) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(
        pyarrow.table({"text": rows, "n": list(range(len(rows)))}), path, row_group_size=group
    )
    return path


@pytest.mark.parametrize("start", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.parquet"])
def test_texts_from_any_place_on(name: str, start: int, tmp_path: Path) -> None:
    path = tmp_path / name
    if name.endswith(".parquet"):
        parquet(path, [*TEXTS])
    elif name == "a.json":
        path.write_text(json.dumps([{"text": text} for text in TEXTS]))
    else:
        path.write_bytes(gzip.compress(lines()) if name.endswith(".gz") else lines())
    assert read(path, start) == TEXTS[start:]
    texts = Texts(path, "text")
    assert texts.done == 0 < texts.total
    list(texts)
    assert texts.done == texts.total


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.txt.gz"])
def test_a_text_file_is_one_text(name: str, tmp_path: Path) -> None:
    data = "\ufeffAlice\n\nwas — there\n".encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert read(path) == ["Alice\n\nwas — there\n"]
    assert read(path, 1) == []
    assert [r.where for r in Texts(path, "text")] == [str(path)]


def test_another_key(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines("content"))
    assert read(tmp_path / "a.jsonl", key="content") == TEXTS
    assert read(tmp_path / "a.jsonl") == ["has no 'text', but 'content', 'id' (see --text-key)"] * 3


def test_a_value_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": 3}\n[1]\n{"text": "x"}\n')
    assert read(tmp_path / "a.jsonl") == [
        "'text' must be text, not a number",
        "a JSON object is needed, not an array",
        "x",
    ]
    assert read(parquet(tmp_path / "a.parquet", [None, "x"])) == ["'text' must be text, not null", "x"]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"ab\n\xff", "a.txt:2: not UTF-8 text: byte 0xff"),
        ("a.txt.gz", b"\x1f\x8bnone", "a.txt.gz: the gzip data is damaged"),
        ("a.jsonl.gz", gzip.compress(b"x" * 999, mtime=0)[:20], "the gzip data is damaged from here on"),
        ("a.parquet", b"PAR1nothing", "a.parquet: not readable as Parquet"),
        ("a.jsonl", b"PAR1", "is a Parquet file"),
    ],
)
def test_damaged_files_are_named(name: str, data: bytes, message: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError) as refusal:
        read(tmp_path / name)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_parquet_file_without_the_column(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no column 'content', but text, n \(--text-key names another\)"):
        read(parquet(tmp_path / "a.parquet", ["x"]), key="content")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet"])
def test_no_such_file(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read(tmp_path / name)
