"""Which files of texts there are, and reading them again and again."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from openelm_mlx.finetune.data.corpus import (
    Reader,
    TextSource,
    find_corpus,
    held_out,
    least_read,
    texts_of,
    weighted_paths,
)
from openelm_mlx.finetune.data.records import DataError


def write(path: Path, *texts: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".txt":
        path.write_text("".join(texts))
    else:
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_a_folder_without_splits_is_all_its_texts(tmp_path: Path) -> None:
    files = [write(tmp_path / name, "x") for name in ("a.txt", "b/c.jsonl", "b/d.txt")]
    write(tmp_path / "notes.pdf.txt.bak", "no")
    corpus = find_corpus(str(tmp_path), None, None)
    assert corpus.train == (TextSource(str(tmp_path), tuple(files), 1.0),)
    assert corpus.valid is corpus.test is None


def test_a_folder_with_splits(tmp_path: Path) -> None:
    one, two = write(tmp_path / "train" / "1.txt", "x"), write(tmp_path / "train" / "2.txt", "y")
    valid, test = write(tmp_path / "validation.jsonl", "v"), write(tmp_path / "test.txt", "t")
    corpus = find_corpus(str(tmp_path), None, None)
    assert corpus.train[0].files == (one, two)
    assert corpus.valid is not None
    assert corpus.test is not None
    assert (corpus.valid.files, corpus.test.files) == ((valid,), (test,))
    assert corpus.files == (one, two, valid, test)
    other = write(tmp_path / "other.txt", "o")
    named = find_corpus(str(tmp_path), str(other), None)
    assert named.valid is not None
    assert named.valid.files == (other,)


def test_several_with_weights(tmp_path: Path) -> None:
    write(tmp_path / "books" / "a.txt", "x")
    write(tmp_path / "web.jsonl", "y")
    corpus = find_corpus(f"{tmp_path}/books=0.7, {tmp_path}/web.jsonl=.3", None, None)
    assert [(s.name, s.weight) for s in corpus.train] == [(f"{tmp_path}/books", 0.7), (f"{tmp_path}/web.jsonl", 0.3)]
    odd = write(tmp_path / "a=1,b=2.txt", "x")
    assert weighted_paths(str(odd)) == [(str(odd), 1.0)], "a name that is there is no list"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "there is no data: name a file or a folder with --data"),
        ("hf:a", "hf:a: a data set of the Hub cannot be streamed; save it as Parquet or JSON Lines first"),
        ("a.txt=0,b.txt", "--data: the weight of 'a.txt' must be a positive number, not '0'"),
        ("a.txt=2,b.txt", "--data: a.txt=2,b.txt: give every source a weight, or none"),
        ("a.txt=x", "--data: the weight of 'a.txt' must be a positive number, not 'x'"),
        (",", "--data: ,: has a source without a name"),
        ("a.txt,a.txt=2", "--data: names 'a.txt' twice"),
        ("absent.txt", "absent.txt: no such file"),
        ("absent", "absent: no such file or folder"),
    ],
)
def test_what_is_not_there_or_no_weight(data: str | None, message: str) -> None:
    with pytest.raises(DataError) as refusal:
        find_corpus(data, None, None)
    assert str(refusal.value) == message


def test_folders_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="has no file of texts; their names end in"):
        find_corpus(str(tmp_path / "empty"), None, None)
    write(tmp_path / "two" / "train.txt", "x")
    write(tmp_path / "two" / "train.jsonl", "x")
    with pytest.raises(DataError, match=r"has train.txt and train.jsonl, and only one can be train"):
        find_corpus(str(tmp_path / "two"), None, None)
    (tmp_path / "two" / "train.jsonl").unlink()
    (tmp_path / "two" / "valid.txt").symlink_to("gone.txt")
    with pytest.raises(DataError, match=r"valid\.txt: no such file"):
        find_corpus(str(tmp_path / "two"), None, None)
    write(tmp_path / "valid" / "valid.txt", "x")
    with pytest.raises(DataError, match="has no texts to train on beside valid"):
        find_corpus(str(tmp_path / "valid"), None, None)
    (tmp_path / "a.pdf").touch()
    with pytest.raises(DataError, match=r"a\.pdf: is no file of texts"):
        find_corpus(str(tmp_path / "a.pdf"), None, None)


@pytest.fixture
def source(tmp_path: Path) -> TextSource:
    counts = {"a": 3, "b": 0, "c": 1, "d": 4}
    files = [write(tmp_path / f"{name}.jsonl", *(f"{name}{n}" for n in range(counts[name]))) for name in counts]
    return TextSource("letters", tuple(files))


def texts(reader: Reader, count: int) -> list[str]:
    return [next(reader).values["text"] for _ in range(count)]


def test_each_epoch_has_every_text_once_in_an_order_of_files_of_its_own(source: TextSource) -> None:
    reader = Reader(source, "text", 0)
    epochs = [texts(reader, 8) for _ in range(6)]
    assert all(Counter(epoch) == Counter(epochs[0]) for epoch in epochs)
    assert len(set(map(tuple, epochs))) > 1
    assert [record.values["text"] for record, _ in texts_of(source, "text")] == sorted(epochs[0])
    assert texts(Reader(source, "text", 0), 8) == epochs[0]
    assert reader.place.epoch == 6, "known before the next text is asked for"


@pytest.mark.parametrize("passed", range(18))
def test_from_a_state_it_goes_on_as_if_it_never_stopped(source: TextSource, passed: int) -> None:
    reader = Reader(source, "text", 3)
    texts(reader, passed)
    other = Reader(source, "text", 3)
    other.seek(json.loads(json.dumps(reader.state)))
    assert texts(other, 12) == texts(reader, 12)


def test_a_source_without_texts(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="empty: has no texts"):
        next(Reader(TextSource("empty", (write(tmp_path / "a.jsonl"), write(tmp_path / "b.jsonl"))), "text", 0))


def test_progress_through_a_source(source: TextSource) -> None:
    parts = [part for _, part in texts_of(source, "text")]
    assert parts == sorted(parts)
    assert parts[-1] == 1


def test_what_is_held_out_is_a_matter_of_the_text() -> None:
    kept = [held_out(f"text {n}", 0, 0.2) for n in range(5000)]
    assert 0.18 < sum(kept) / 5000 < 0.22
    assert [held_out(f"text {n}", 0, 0.3) for n in range(5000) if kept[n]] == [True] * sum(kept), "more keeps those too"
    assert kept != [held_out(f"text {n}", 1, 0.2) for n in range(5000)]
    assert not held_out("x", 0, 0.0)


def test_shares_of_tokens() -> None:
    drawn, sizes = [0, 0, 0], (10, 1000, 100)
    for _ in range(1000):
        n = least_read(drawn, [0.5, 0.3, 0.2])
        drawn[n] += sizes[n]
    total = sum(drawn)
    assert [round(d / total, 2) for d in drawn] == pytest.approx([0.5, 0.3, 0.2], abs=0.02)
