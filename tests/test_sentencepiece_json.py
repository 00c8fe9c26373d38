"""A SentencePiece model as tokenizer.json: the same ids, or a refusal that says why."""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any

import pytest
import sentencepiece  # type: ignore[import-untyped,unused-ignore]
from hypothesis import given
from hypothesis import strategies as st

from openelm_mlx.errors import TokenizerError
from openelm_mlx.sentencepiece_json import CONTROL, NORMAL, parse_model, sentencepiece_to_json, special_pieces
from tests.data.tokenizer.make_model import TEXT
from tests.support.tokenizers_made import MODEL

DATA = MODEL.read_bytes()
PARSED = parse_model(DATA)
PIECES = [piece.replace("▁", " ") for piece, kind in zip(PARSED.pieces, PARSED.types, strict=True) if kind == NORMAL]
SENTENCEPIECE = sentencepiece.SentencePieceProcessor(model_proto=DATA)


def converted(data: bytes) -> Any:
    from tokenizers import Tokenizer

    result = Tokenizer.from_str(sentencepiece_to_json(data))
    result.encode_special_tokens = True
    return result


CONVERTED = converted(DATA)


def trained(**options: object) -> bytes:
    out = io.BytesIO()
    given: dict[str, Any] = {
        "model_type": "bpe",
        "vocab_size": 400,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
    }
    given |= {"hard_vocab_limit": False, "minloglevel": 2} | options
    lines = iter(TEXT.splitlines())
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines, model_writer=out, **given)
    return out.getvalue()


def assert_same_ids(text: str) -> None:
    assert CONVERTED.encode(text, add_special_tokens=False).ids == SENTENCEPIECE.encode(text), repr(text)


@given(st.text())
def test_any_text(text: str) -> None:
    assert_same_ids(text)


@given(st.lists(st.sampled_from(PIECES), max_size=40))
def test_pieces_glued_together(pieces: list[str]) -> None:
    assert_same_ids("".join(pieces))


@given(st.sampled_from(PIECES), st.integers(1, 200), st.text("ab ▁\n<s>", max_size=5))
def test_long_runs(piece: str, count: int, end: str) -> None:
    assert_same_ids(piece * count + end)


@given(st.text(" ▁\t\n-ae", max_size=40))
def test_spaces(text: str) -> None:
    assert_same_ids(text)


def test_control_pieces_are_special_and_bos_is_added() -> None:
    result = json.loads(sentencepiece_to_json(DATA))
    specials = [(token["id"], token["content"]) for token in result["added_tokens"] if token["special"]]
    assert specials == [(0, "<unk>"), (1, "<s>"), (2, "</s>")]
    assert CONVERTED.encode("").ids == [1]
    assert special_pieces(DATA) == ("<s>", "</s>")


def test_a_model_without_dummy_prefix() -> None:
    data = trained(add_dummy_prefix=False, remove_extra_whitespaces=False)
    processor, result = sentencepiece.SentencePieceProcessor(model_proto=data), converted(data)
    for text in ("the book", " the", "", "  x\n y"):
        assert result.encode(text, add_special_tokens=False).ids == processor.encode(text)
        assert result.decode(processor.encode(text)) == text


def test_a_model_that_squeezes_spaces() -> None:
    data = trained(remove_extra_whitespaces=True)
    processor, result = sentencepiece.SentencePieceProcessor(model_proto=data), converted(data)
    for text in ("the book", "  the   book  ", "   ", "a \n b", " a", "x"):
        assert result.encode(text, add_special_tokens=False).ids == processor.encode(text)


def test_user_defined_symbols_are_ordinary_text() -> None:
    data = trained(user_defined_symbols=["<|user|>", "<|end|>"], remove_extra_whitespaces=False)
    processor, result = sentencepiece.SentencePieceProcessor(model_proto=data), converted(data)
    for text in ("the <|user|> book<|end|>the", "<|user|>\nbook<|end|>", "<|user|><|end|>", " <|end|>", "<|user|"):
        assert result.encode(text, add_special_tokens=False).ids == processor.encode(text), text
    symbol = processor.piece_to_id("<|user|>")
    assert result.decode([symbol]) == "<|user|>"
    assert [token["special"] for token in json.loads(sentencepiece_to_json(data))["added_tokens"]].count(False) == 2


def test_a_model_without_byte_fallback_gives_the_unknown_token() -> None:
    data = trained(byte_fallback=False, vocab_size=200, remove_extra_whitespaces=False)
    processor, result = sentencepiece.SentencePieceProcessor(model_proto=data), converted(data)
    for text in ("the 日本 book", "日", "日日 日"):
        assert result.encode(text, add_special_tokens=False).ids == processor.encode(text)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"model_type": "unigram", "vocab_size": 400}, "unigram"),
        ({"model_type": "char"}, "character"),
        ({"normalization_rule_name": "nmt_nfkc"}, "nmt_nfkc"),
        ({"treat_whitespace_as_suffix": True}, "suffix"),
    ],
)
def test_other_models_are_refused_by_name(options: dict[str, object], named: str) -> None:
    with pytest.raises(TokenizerError, match=rf"{named}.*tokenizer\.json"):
        sentencepiece_to_json(trained(**options))


def message(*fields: tuple[int, bytes | int]) -> bytes:
    """A protobuf message with short fields."""
    out = b""
    for number, value in fields:
        if isinstance(value, int):
            out += bytes([number << 3, value])
        else:
            out += bytes([number << 3 | (5 if number == 2 and len(value) == 4 else 2)])
            out += value if out[-1] & 7 == 5 else bytes([len(value)]) + value
    return out


def model_of(*pieces: tuple[str, float, int]) -> bytes:
    import struct

    body = [(1, message((1, text.encode()), (2, struct.pack("<f", score)), (3, kind))) for text, score, kind in pieces]
    normalizer = message((1, b"identity"), (3, 1), (4, 0))
    return message((1, message((1, b"<unk>"), (3, 2))), *body, (2, message((3, 2))), (3, normalizer))


def test_a_model_written_by_hand_is_read() -> None:
    model = parse_model(model_of(("</s>", 0.0, CONTROL), ("▁", -1.5, NORMAL)))
    assert (model.pieces, model.scores, model.types) == (("<unk>", "</s>", "▁"), (0.0, 0.0, -1.5), (2, 3, 1))
    assert (model.algorithm, model.dummy_prefix, model.squeezes_spaces) == ("BPE", True, False)


@pytest.mark.parametrize(
    ("pieces", "named"),
    [
        ([("a", -3, 1), ("b", -4, 1), ("ab", -1, 1), ("ba", -1, 1)], "scores several pieces alike"),
        ([("a", -3, 1), ("ab", -1, 1)], "'b', which is no piece"),
        ([("a", -3, 1), ("b", -3, 5)], "unused"),
        ([("a", -3, 1), ("a", -4, 1)], "twice"),
    ],
)
def test_what_cannot_be_exact_is_refused(pieces: list[tuple[str, float, int]], named: str) -> None:
    with pytest.raises(TokenizerError, match=named):
        sentencepiece_to_json(model_of(*pieces))


def test_the_self_check_refuses_a_wrong_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    from openelm_mlx import sentencepiece_json

    monkeypatch.setattr(sentencepiece_json, "_merges", lambda model: [])
    with pytest.raises(TokenizerError, match="differs from SentencePiece on"):
        sentencepiece_to_json(DATA)


@pytest.mark.parametrize("data", [b"", b"\x0a", b"\x0a\xff\xff", b"\x0f\x00", b"\xff" * 40, b"\x08\x01", DATA[:100]])
def test_other_data_is_refused(data: bytes) -> None:
    with pytest.raises(TokenizerError, match="expected a SentencePiece model"):
        parse_model(data)


@given(st.binary(max_size=60))
def test_no_data_escapes_as_another_error(data: bytes) -> None:
    with contextlib.suppress(TokenizerError):
        parse_model(data)
