"""Perplexities of n-gram models over a tokenizer's tokens."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from openelm_mlx.benchmarks import ngrams
from openelm_mlx.benchmarks.kneser_ney import KneserNey
from openelm_mlx.tokenizer import Tokenizer

MODEL = Path(__file__).parents[1] / "data" / "tokenizer" / "tokenizer.model"
TRAIN = ["Alice was beginning to get very tired", "Alice was late", "the Rabbit was late, 🙂 and Alice was tired"]
VALID = ["the Rabbit was very tired", "Alice — late\nand tired"]


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    for name, texts in (("train", TRAIN), ("valid", VALID)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return [str(MODEL), str(tmp_path / "train.jsonl"), str(tmp_path / "valid.jsonl")]


def test_documents_begin_and_end(files: list[str]) -> None:
    tokenizer = Tokenizer.from_file(MODEL)
    documents = ngrams.read_documents(files[2], tokenizer)
    assert documents.ids == [[1, *tokenizer.encode(text, add_bos=False), 2] for text in VALID]
    assert documents.nbytes == len("".join(VALID).encode())
    assert documents.predicted == sum(len(tokenizer.encode(text, add_bos=False)) + 1 for text in VALID)


def test_measures_are_of_all_texts_together(files: list[str]) -> None:
    tokenizer = Tokenizer.from_file(MODEL)
    train, valid = (ngrams.read_documents(path, tokenizer) for path in files[1:])
    (found,) = ngrams.measure(train, valid, tokenizer.vocab_size, [3])
    model = KneserNey(train.ids, order=3, vocab_size=tokenizer.vocab_size)
    each = [p for ids in valid.ids for p in model.log_probabilities(ids)]
    assert len(each) == valid.predicted
    assert found.perplexity == pytest.approx(math.exp(-sum(each) / len(each)))
    assert found.bits_per_byte == pytest.approx(-sum(each) / math.log(2) / len("".join(VALID).encode()))


def test_a_table_of_single_tokens_and_of_longer_grams(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert ngrams.main([*files, "--order", "4"]) == 0
    *_, one, four = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in (one, four)] == ["1", "4"]
    assert float(four.split()[1]) < float(one.split()[1])


def test_another_text_key(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in files[1:]:
        Path(path).write_text(Path(path).read_text().replace('"text"', '"body"'))
    assert ngrams.main([*files, "--text-key=body"]) == 0
    assert ngrams.main(files) == 2
    assert "train.jsonl:1: has no 'text', but 'body'" in capsys.readouterr().err


def test_no_text_is_refused(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path(files[2]).write_text("")
    assert ngrams.main(files) == 2
    assert capsys.readouterr().err == f"error: {files[2]}: has no text\n"
