"""Trained tokenizers, beside SentencePiece itself."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sentencepiece import SentencePieceProcessor

from openelm_mlx.errors import OpenELMError
from openelm_mlx.finetune.tokenizer_options import LONGEST_LINE, TokenizerOptions
from openelm_mlx.finetune.tokenizer_training import Trained, train_tokenizer
from openelm_mlx.tokenizer import Tokenizer

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
TEXTS = [*PAGE.split("\n\n"), "</s> and <s> are text, <unk> too.", "naïve café 模型 🙂\n\tx = 1234"]
ODD = (
    "Once upon a time there was a model.",
    "  two  spaces,\ttabs\t\t and\nnewlines\n\n\r\n at the end  ",
    "naïve café, cafe\u0301, 日本語のテキスト, العربية, 🙂👩‍👩‍👧",
    "<unk> <s>a</s> <0x0A> [INST] hi</s>",
    "x = 1234567890 + 0.5",
    "\x00\x01\x7f\u00a0\u2028\ufeff\u200b",
    " ",
    "",
)


def save(path: Path, texts: list[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts))
    return path


def train(out: Path, data: str | Path, *, force: bool = False, vocab_size: int = 400, **options: Any) -> Trained:
    return train_tokenizer(str(data), out, TokenizerOptions(vocab_size=vocab_size, **options), force=force)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    return train(folder / "out", save(folder / "texts.jsonl", TEXTS), vocab_size=500)


@pytest.fixture(scope="module")
def tokenizer(made: Trained) -> Tokenizer:
    found = Tokenizer.from_folder(made.folder)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def pieces(made: Trained) -> SentencePieceProcessor:
    return SentencePieceProcessor(str(made.folder / "tokenizer.model"))


def test_it_is_of_llama_2s_kind(tokenizer: Tokenizer, pieces: SentencePieceProcessor) -> None:
    assert pieces.get_piece_size() == tokenizer.vocab_size == 500
    assert (pieces.unk_id(), pieces.bos_id(), pieces.eos_id(), pieces.pad_id()) == (0, 1, 2, -1)
    assert [pieces.id_to_piece(n) for n in range(3)] == ["<unk>", "<s>", "</s>"]
    assert [pieces.id_to_piece(3 + n) for n in range(256)] == [f"<0x{n:02X}>" for n in range(256)]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.eos_token_ids) == (1, 2, frozenset([2]))
    learned = [pieces.id_to_piece(n) for n in range(259, 500)]
    assert [piece for piece in learned if re.search(r"\d.|.\d", piece)] == []  # a digit is a piece by itself
    assert {"▁the", "▁"} <= set(learned)


@pytest.mark.parametrize("text", ODD)
def test_ids_are_sentencepieces(text: str, tokenizer: Tokenizer, pieces: SentencePieceProcessor) -> None:
    assert tokenizer.encode(text, add_bos=False) == pieces.encode(text)
    assert tokenizer.encode(text) == [1, *pieces.encode(text)]


@pytest.mark.parametrize("text", ODD)
def test_text_comes_back_to_the_byte(text: str, tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(text)).encode() == text.encode()


def test_every_byte_has_its_token(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_bytes(3 + n) for n in range(256)] == [bytes([n]) for n in range(256)]
    assert tokenizer.encode("\n", add_bos=False)[-1] == 3 + 0x0A


def test_control_tokens_written_in_texts_stay_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<s>a</s><unk>", add_bos=False)
    assert not {0, 1, 2} & set(ids)
    assert tokenizer.decode(ids) == "<s>a</s><unk>"


def test_what_is_told_of_it(made: Trained, pieces: SentencePieceProcessor) -> None:
    lines = [line for text in TEXTS for line in text.splitlines() if line.strip()]
    tokens, nbytes = sum(len(pieces.encode(line)) for line in lines), sum(len(line.encode()) for line in lines)
    assert (made.texts, made.nbytes, made.sampled, made.measured) == (len(TEXTS), nbytes, nbytes, nbytes)
    assert made.bytes_per_token == pytest.approx(nbytes / tokens)
    assert made.tokens_per_word == pytest.approx(tokens / len(" ".join(lines).split()))


def test_the_same_texts_and_options_make_the_same_files(made: Trained, tmp_path: Path) -> None:
    save(tmp_path / "elsewhere.jsonl", TEXTS)
    again = train(tmp_path / "again", tmp_path / "elsewhere.jsonl", vocab_size=500)
    assert {p.name: p.read_bytes() for p in again.folder.iterdir()} == {
        p.name: p.read_bytes() for p in made.folder.iterdir()
    }


def test_files_of_every_kind_and_folders_of_them(made: Trained, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    save(folder / "a.jsonl", TEXTS[:3])
    (folder / "b.txt").write_text(TEXTS[3])
    (folder / "c.json.gz").write_bytes(gzip.compress(json.dumps([{"text": text} for text in TEXTS[4:7]]).encode()))
    (folder / "deep" / "d.txt.gz").write_bytes(gzip.compress("\n".join(TEXTS[7:]).encode()))
    found = train(tmp_path / "out", folder, vocab_size=500)
    assert found.texts == 8
    assert found.nbytes == made.nbytes
    named = ",".join(str(folder / name) for name in ("a.jsonl", "b.txt", "c.json.gz", "deep"))
    train(tmp_path / "named", named, vocab_size=500)
    models = [(tmp_path / name / "tokenizer.model").read_bytes() for name in ("out", "named")]
    assert models == [(made.folder / "tokenizer.model").read_bytes()] * 2


def test_texts_to_validate_on_are_not_learned_from(tmp_path: Path) -> None:
    save(tmp_path / "train.jsonl", TEXTS)
    save(tmp_path / "valid.jsonl", ["zyzzyva " * 500])
    assert train(tmp_path / "out", tmp_path).texts == len(TEXTS)


def test_another_text_key(made: Trained, tmp_path: Path) -> None:
    save(tmp_path / "a.jsonl", TEXTS, key="body")
    out = train(tmp_path / "out", tmp_path / "a.jsonl", vocab_size=500, text_key="body").folder
    assert (out / "tokenizer.model").read_bytes() == (made.folder / "tokenizer.model").read_bytes()


def test_rare_characters_are_written_as_bytes(tmp_path: Path) -> None:
    save(tmp_path / "a.jsonl", ["a plain text " * 300 + "模"])
    few, all_ = (
        train(tmp_path / f"{part}", tmp_path / "a.jsonl", vocab_size=275, character_coverage=part).tokenizer
        for part in (0.9995, 1.0)
    )
    assert few.encode("模", add_bos=False)[-3:] == [3 + byte for byte in "模".encode()]
    assert all_.token_bytes(all_.encode("模", add_bos=False)[-1]) == "模".encode()


def test_characters_are_learned_as_new_models_get_them(tmp_path: Path) -> None:
    save(tmp_path / "a.jsonl", ["cafe\u0301 " * 200])
    found = train(tmp_path / "out", tmp_path / "a.jsonl", vocab_size=264).tokenizer
    assert [found.token_bytes(token) for token in found.encode("é", add_bos=False)][-1] == "é".encode()


def test_of_more_text_a_random_part_is_learned_from(tmp_path: Path) -> None:
    save(tmp_path / "a.jsonl", TEXTS)
    found = [
        train(tmp_path / f"{n}", tmp_path / "a.jsonl", max_bytes=4000, seed=seed) for n, seed in enumerate((1, 1, 2))
    ]
    assert all(0 < t.sampled <= 4000 < t.nbytes for t in found)
    one, same, other = ((t.folder / "tokenizer.model").read_bytes() for t in found)
    assert one == same != other


def test_long_lines_are_learned_from_whole(tmp_path: Path) -> None:
    words = [f"word{n % 90}" for n in range(9000)]
    save(tmp_path / "long.jsonl", [" ".join(words), "x" * (LONGEST_LINE + 1)])
    save(
        tmp_path / "short.jsonl", [*(" ".join(words[n : n + 10]) for n in range(0, 9000, 10)), "x" * LONGEST_LINE, "x"]
    )
    long, short = (
        train(tmp_path / f"{name}-out", tmp_path / f"{name}.jsonl", vocab_size=290) for name in ("long", "short")
    )
    assert (long.folder / "tokenizer.model").read_bytes() == (short.folder / "tokenizer.model").read_bytes()


def test_what_sentencepiece_leaves_out_does_not_take_its_line_along(tmp_path: Path) -> None:
    line = "some words to learn"
    save(tmp_path / "a.jsonl", [f"{line} {mark} {line}" for mark in ("\0", "▅", "\ud800")] * 20)
    found = train(tmp_path / "out", tmp_path / "a.jsonl", vocab_size=290).tokenizer
    assert len(found.encode(line, add_bos=False)) < 9


def test_a_vocabulary_that_the_texts_do_not_give(tmp_path: Path) -> None:
    data = save(tmp_path / "a.jsonl", ["Alice was beginning to get very tired"])
    with pytest.raises(OpenELMError, match="--vocab-size 32,000 is too large for these texts: ") as refused:
        train(tmp_path / "out", data, vocab_size=32_000)
    largest = int(re.findall(r"([\d,]+) is the largest that works", str(refused.value))[0])
    assert not (tmp_path / "out").exists()
    assert train(tmp_path / "out", data, vocab_size=largest).tokenizer.vocab_size == largest
    with pytest.raises(OpenELMError, match="too large"):
        train(tmp_path / "more", data, vocab_size=largest + 1)


def test_a_vocabulary_too_small_for_the_characters(tmp_path: Path) -> None:
    data = save(tmp_path / "a.jsonl", ["Alice was beginning to get very tired"])
    with pytest.raises(OpenELMError, match="--vocab-size 260 is too small: 3 special tokens, 256 bytes and") as refused:
        train(tmp_path / "out", data, vocab_size=260)
    smallest = int(re.findall(r"make ([\d,]+);", str(refused.value))[0])
    assert smallest == 3 + 256 + len(set("Alice was beginning to get very tired"))
    assert train(tmp_path / "out", data, vocab_size=smallest).tokenizer.vocab_size == smallest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 0}, "--vocab-size must be a whole number, 1 or more, not 0"),
        ({"max_bytes": 3999}, "--max-bytes must be a whole number, 4000 or more, not 3999"),
        ({"seed": -1}, "--seed must be a whole number, 0 or more, not -1"),
        ({"character_coverage": 0.97}, "--character-coverage must be from 0.98 to 1, not 0.97"),
        ({"character_coverage": float("nan")}, "--character-coverage must be from 0.98 to 1, not nan"),
    ],
)
def test_options_out_of_range(change: dict[str, Any], message: str) -> None:
    with pytest.raises(OpenELMError, match=re.escape(message)):
        replace(TokenizerOptions(vocab_size=400), **change)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "", "a.jsonl: has no text"),
        ("a.jsonl", '{"text": " \\n\\t "}\n', "a.jsonl: has no text"),
        ("a.txt", "", "a.txt: has no text"),
        ("a.jsonl", '{"text": "x"}\n{"body": "y"}\n', "a.jsonl:2: has no 'text', but 'body' (see --text-key)"),
        ("a.jsonl", '{"text": "x"}\n{"te', "a.jsonl:2: the line ends before its JSON object does"),
        ("a.csv", "a,b", "a.csv: is no file of texts; their names end in .txt"),
    ],
)
def test_data_that_cannot_be_learned_from(name: str, content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(OpenELMError, match=re.escape(message)):
        train(tmp_path / "out", tmp_path / name)
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_no_files(tmp_path: Path) -> None:
    with pytest.raises(OpenELMError, match=r"absent\.txt: no such file"):
        train(tmp_path / "out", tmp_path / "absent.txt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(OpenELMError, match="empty: has no file of texts"):
        train(tmp_path / "out", tmp_path / "empty")


def test_weights_are_refused(tmp_path: Path) -> None:
    data = save(tmp_path / "a.jsonl", TEXTS)
    with pytest.raises(OpenELMError, match="a tokenizer learns from all texts alike; leave the weights out"):
        train(tmp_path / "out", f"{data}=0.5")


def test_folders_that_are_there(tmp_path: Path) -> None:
    data = save(tmp_path / "a.jsonl", TEXTS)
    out = train(tmp_path / "out", data).folder
    with pytest.raises(OpenELMError, match="out: exists already; name another folder, or replace it with --force"):
        train(out, data)
    assert train(out, data, vocab_size=420, force=True).tokenizer.vocab_size == 420
    (out / "notes.txt").write_text("mine")
    with pytest.raises(OpenELMError, match="--force only replaces folders written by this program"):
        train(out, data, force=True)
    assert (out / "notes.txt").read_text() == "mine"


def test_texts_are_never_replaced(tmp_path: Path) -> None:
    out = train(tmp_path / "out", save(tmp_path / "a.jsonl", TEXTS)).folder
    data = save(out / "a.jsonl", TEXTS)
    with pytest.raises(OpenELMError, match="out: holds the source itself"):
        train(out, data, force=True)
    assert data.exists()


def test_a_tokenizer_is_not_made_among_its_texts(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    save(folder / "a.jsonl", TEXTS)
    with pytest.raises(OpenELMError, match=r"tok: lies in .*texts, all files of which are trained on"):
        train(folder / "tok", folder)
    assert [p.name for p in folder.iterdir()] == ["a.jsonl"]
    (folder / "a.jsonl").rename(folder / "train.jsonl")  # of such a folder no other file is read
    assert train(folder / "tok", folder).texts == len(TEXTS)


def test_a_place_that_cannot_be_written_to(tmp_path: Path) -> None:
    data = save(tmp_path / "a.jsonl", TEXTS)
    with pytest.raises(OpenELMError, match=r"out: cannot be written: File exists"):
        train(data / "out", data)
