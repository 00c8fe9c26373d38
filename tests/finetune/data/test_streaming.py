"""Batches from texts that are read and tokenized while training."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openelm_mlx.errors import OpenELMError
from openelm_mlx.finetune.data.corpus import find_corpus
from openelm_mlx.finetune.data.encoding import Encoder
from openelm_mlx.finetune.data.formats import Text
from openelm_mlx.finetune.data.records import DataError
from openelm_mlx.finetune.data.streaming import TextFilter, TextStream, pieces
from openelm_mlx.finetune.data.survey import open_stream
from openelm_mlx.finetune.data.types import Batch, Encoded
from openelm_mlx.finetune.settings import Settings
from openelm_mlx.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_file(Path(__file__).parents[2] / "data" / "tokenizer" / "tokenizer.model")
ENCODER = Encoder(TOKENIZER)
WORDS = ("Alice", "was", "beginning", "to", "get", "very", "tired", "of", "sitting", "by", "her", "sister")


def text(number: int, words: int) -> str:
    return " ".join(WORDS[(number * 5 + k * k) % len(WORDS)] for k in range(words)) + f" {number}."


def write(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return path


def stream(data: str, *, window: int = 1 << 22, length: int = 32, **settings: Any) -> TextStream:
    s = Settings(packing="stream", batch_size=3, **settings)
    return TextStream(find_corpus(data, None, None).train, s, TextFilter(s, ENCODER), length, 1000, window=window)


def pairs(batches: list[Batch]) -> Counter[tuple[int, int]]:
    """Every input that is trained with what it should predict."""
    found: Counter[tuple[int, int]] = Counter()
    for batch in batches:
        ids = batch.ids.reshape(-1)
        found.update(zip(ids[batch.places].tolist(), batch.targets.tolist(), strict=True))
    return found


def expected(texts: list[str]) -> Counter[tuple[int, int]]:
    found: Counter[tuple[int, int]] = Counter()
    for t in texts:
        ids = [1, *TOKENIZER.encode(t, add_bos=False), 2]
        found.update(pairwise(ids))
    return found


def first_epoch(s: TextStream) -> list[Batch]:
    batches = []
    while s.position["epoch"] == 0:
        batches.append(next(s))
    return batches


TEXTS = [text(n, 5 + n * 3 % 90) for n in range(30)]


@pytest.mark.parametrize("window", [100, 1 << 22])
@pytest.mark.parametrize("texts", [3, 1024])
def test_an_epoch_trains_each_token_of_each_text_once(window: int, texts: int, tmp_path: Path) -> None:
    s = stream(str(write(tmp_path / "a.jsonl", TEXTS)), window=window, shuffle_window=texts)
    batches = first_epoch(s)
    assert pairs(batches) == expected(TEXTS)
    assert all(batch.ids.shape[1] <= 32 == s.longest_row and len(batch.ids) <= 3 == s.most_rows for batch in batches)


def test_rows_are_nearly_full(tmp_path: Path) -> None:
    batches = first_epoch(stream(str(write(tmp_path / "a.jsonl", TEXTS))))
    assert sum(b.tokens for b in batches) > 0.97 * sum(b.ids.size for b in batches)


@pytest.mark.parametrize("window", [150, 1 << 22])
@pytest.mark.parametrize("passed", [0, 1, 5, 23, 60])
def test_from_a_position_it_goes_on_as_if_it_never_stopped(passed: int, window: int, tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", TEXTS[:20])
    write(tmp_path / "b.jsonl", TEXTS[20:])
    data = f"{tmp_path}/a.jsonl=0.4,{tmp_path}/b.jsonl=0.6"
    whole, other = (stream(data, window=window, shuffle_window=4) for _ in range(2))
    list(islice(whole, passed))
    other.seek(json.loads(json.dumps(whole.position)))
    assert other.position == whole.position
    for a, b in zip(islice(whole, 30), islice(other, 30), strict=True):
        assert np.array_equal(a.ids, b.ids)
        assert np.array_equal(a.targets, b.targets)
        assert a.where == b.where


def test_positions_of_other_data_are_refused(tmp_path: Path) -> None:
    s = stream(str(write(tmp_path / "a.jsonl", TEXTS)))
    next(s)
    for change, message in (
        ({"sources": []}, "is one of other sources"),
        ({"batch": 10_000}, "there is no batch 10000 in window 0"),
        ({"window": -1}, "position: window must be"),
        ({"sources": [{"epoch": 0, "file": 7, "record": 0, "drawn": 0}]}, "has fewer files"),
    ):
        with pytest.raises(OpenELMError, match=message):
            stream(str(tmp_path / "a.jsonl")).seek({**s.position, **change})


def test_sources_have_their_shares_of_tokens(tmp_path: Path) -> None:
    write(tmp_path / "long.jsonl", [text(n, 80) for n in range(40)])
    write(tmp_path / "short.jsonl", [text(n, 6) for n in range(15)])
    s = stream(f"{tmp_path}/long.jsonl=3,{tmp_path}/short.jsonl=1", window=2000)
    inputs: Counter[str] = Counter()
    for batch in islice(s, 150):
        for where, size in zip(batch.where, (n for row in batch.documents for n in row), strict=True):
            inputs[Path(where).name.split(":")[0]] += size
    assert inputs["long.jsonl"] / inputs.total() == pytest.approx(0.75, abs=0.03)


@pytest.mark.parametrize("length", [1, 5, 31, 32, 33, 400])
def test_pieces_predict_each_token_once(length: int) -> None:
    ids = np.arange(100, 133, dtype=np.int32)
    learn = np.ones(33, np.bool_)
    learn[:4] = False
    found = list(pieces(Encoded(ids, learn, "x"), length))
    assert all(2 <= len(p.ids) <= length + 1 and not p.learn[0] for p in found)
    assert [int(i) for p in found for i in p.ids[1:][p.learn[1:]]] == ids[4:].tolist()
    assert all(p.ids[-1] == q.ids[0] for p, q in pairwise(found))


def test_what_is_left_out_and_normalized() -> None:
    from openelm_mlx.finetune.data.records import Record

    decomposed = "cafe\u0301 " * 10
    s = Settings(packing="stream", nfc=True, min_characters=45, min_tokens=14)
    filter = TextFilter(s, ENCODER)

    def seen(t: str) -> Encoded | None:
        kept = filter.text(Record("a.jsonl:1", {"text": t}))
        return None if kept is None else filter.encode(kept, "a.jsonl:1")

    kept = seen(decomposed)
    assert kept is not None
    direct = ENCODER.encode(Text("caf\u00e9 " * 10), "x")
    assert direct is not None
    assert kept.ids.tolist() == direct.ids.tolist(), "50 characters, of which 60 were written"
    assert seen("x" * 44) is None
    assert seen(" Alice" * 8) is None, "too few tokens"
    assert filter.left_out() == "2 texts left out as too short (--min-characters 45, --min-tokens 14)"
    with pytest.raises(DataError, match=r"a\.jsonl:1: no text; --skip-bad-lines counts"):
        filter.text(Record("a.jsonl:1", {}, "no text"))
    lenient = TextFilter(Settings(packing="stream", skip_bad_lines=True), ENCODER)
    assert lenient.text(Record("a.jsonl:1", {}, "no text")) is None
    assert lenient.left_out() == "1 records left out, the first: a.jsonl:1: no text"


class TestSurvey:
    def opened(self, data: str, **settings: Any) -> tuple[TextStream, list[Encoded], list[str]]:
        s = Settings(packing="stream", **settings)
        said: list[str] = []
        corpus = find_corpus(data, None, None)
        found, valid, _ = open_stream(s, corpus, TextFilter(s, ENCODER), 32, said.append, None)
        return found, valid, said

    def test_small_data_is_counted_and_a_part_of_it_kept(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.jsonl", TEXTS * 1)
        found, valid, said = self.opened(str(path), valid_fraction=0.3)
        trained = pairs(first_epoch(found))
        kept: Counter[tuple[int, int]] = Counter()
        for piece in valid:
            kept.update(zip(piece.ids[:-1].tolist(), piece.ids[1:].tolist(), strict=True))
        assert trained + kept == expected(TEXTS)
        texts = len({piece.where for piece in valid})
        assert 0 < texts < 20
        assert said == [
            f"train: {30 - texts} texts, {trained.total():,} tokens ({path})",
            f"valid: {texts} texts, {kept.total():,} tokens",
        ]
        rows = 4 * 32
        assert found.batches_in(2) == -(-2 * trained.total() // rows)

    def test_much_data_is_estimated(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from openelm_mlx.finetune.data import survey

        monkeypatch.setattr(survey, "_SAMPLED", 2_000)
        monkeypatch.setattr(survey, "_SURVEYED", 20_000)
        texts = [text(n, 5 + n * 7 % 90) for n in range(400)]
        _, _, said = self.opened(str(write(tmp_path / "a.jsonl", texts)), valid_fraction=0)
        about = int(said[0].split("about ")[1].split()[0].replace(",", ""))
        assert about == pytest.approx(expected(texts).total(), rel=0.1)

    def test_nothing_to_train_on_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="no text is left to train on; 30 texts left out as too short"):
            self.opened(str(write(tmp_path / "a.jsonl", TEXTS)), min_characters=100_000)
        with pytest.raises(DataError, match="there is none"):
            self.opened(str(write(tmp_path / "b.jsonl", [])))

    def test_a_file_to_validate_on_is_read_whole(self, tmp_path: Path) -> None:
        write(tmp_path / "train.jsonl", TEXTS[:20])
        write(tmp_path / "valid.jsonl", TEXTS[20:])
        found, valid, _ = self.opened(str(tmp_path), valid_fraction=0.5)
        assert pairs(first_epoch(found)) == expected(TEXTS[:20]), "nothing is kept from it then"
        assert sum(len(p.ids) - 1 for p in valid) == expected(TEXTS[20:]).total()
