"""Ids of text that goes on where other text ended: SentencePiece's without its dummy prefix."""

from __future__ import annotations

import json
from typing import Any

import pytest
import sentencepiece  # type: ignore[import-untyped,unused-ignore]
from hypothesis import given
from hypothesis import strategies as st

from openelm_mlx.sentencepiece_json import sentencepiece_to_json
from openelm_mlx.tokenizer import Tokenizer
from openelm_mlx.tokenizer_files import TokenizerSource
from tests.support.tokenizers_made import MODEL, added, byte_level_json
from tests.test_sentencepiece_json import trained

SENTENCEPIECE = sentencepiece.SentencePieceProcessor(model_file=str(MODEL))
SMALL = Tokenizer.from_file(MODEL)
BYTES = Tokenizer(TokenizerSource("made", json.dumps(byte_level_json())))


# A later occurrence of a message overrides fields of an earlier one: normalizer_spec (3) with add_dummy_prefix (3) off.
WITHOUT_PREFIX = sentencepiece.SentencePieceProcessor(model_proto=MODEL.read_bytes() + b"\x1a\x02\x18\x00")


@given(st.text())
def test_a_continuation_has_no_dummy_prefix_and_no_bos(text: str) -> None:
    assert SMALL.encode_continuation(text) == WITHOUT_PREFIX.encode(text)
    assert BYTES.encode_continuation(text) == BYTES.encode(text, add_bos=False)


@given(st.text(), st.text())
def test_a_text_and_its_continuation_decode_to_both(text: str, more: str) -> None:
    ids = [*SMALL.encode(text), *SMALL.encode_continuation(more)]
    assert SMALL.decode(ids) == (text + more if text else more.removeprefix(" ")).replace("▁", " ")


def pieces_of(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.token_bytes(token).decode() for token in ids]


def test_the_space_belongs_to_whoever_has_it() -> None:
    assert pieces_of(SMALL, SMALL.encode_continuation("a Rabbit")) == ["a", " Rabbit"]
    assert pieces_of(SMALL, SMALL.encode_continuation(" a Rabbit")) == [" a", " Rabbit"]
    assert SMALL.encode_continuation("") == []
    assert {0, 1, 2}.isdisjoint(SMALL.encode_continuation("</s><s>"))


@pytest.mark.parametrize(
    "pre_tokenizer",
    [
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False},
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": False},
        {"type": "Sequence", "pretokenizers": [{"type": "Metaspace", "replacement": "▁", "add_prefix_space": True}]},
    ],
)
def test_a_prefix_made_by_the_pre_tokenizer_is_left_out_too(pre_tokenizer: dict[str, Any]) -> None:
    parsed = json.loads(SMALL._source.json_text) | {"normalizer": None, "pre_tokenizer": pre_tokenizer}
    tokenizer = Tokenizer(TokenizerSource("made", json.dumps(parsed)))
    assert tokenizer.encode("Alice was") == SENTENCEPIECE.encode("Alice was")
    assert tokenizer.encode_continuation("Alice was") == WITHOUT_PREFIX.encode("Alice was")


def test_a_byte_level_prefix_is_left_out_too() -> None:
    parsed = byte_level_json()
    parsed["pre_tokenizer"] |= {"add_prefix_space": True}
    tokenizer = Tokenizer(TokenizerSource("made", json.dumps(parsed)))
    assert tokenizer.encode("the") == BYTES.encode(" the")
    assert tokenizer.encode_continuation("the") == BYTES.encode("the")


def test_what_stands_for_the_prefix_in_a_converted_model_is_left_out_too() -> None:
    for options in ({"user_defined_symbols": ["<|user|>"], "remove_extra_whitespaces": False}, {}):
        data = trained(**options)
        tokenizer = Tokenizer(TokenizerSource("made", sentencepiece_to_json(data)))
        assert tokenizer.encode("the cat") == sentencepiece.SentencePieceProcessor(model_proto=data).encode("the cat")
        assert tokenizer.decode(tokenizer.encode("the") + tokenizer.encode_continuation("cat")) == "thecat"
        assert tokenizer.decode(tokenizer.encode("the") + tokenizer.encode_continuation(" cat")) == "the cat"


def test_a_vocabulary_taken_in_halves_gets_no_prefix_between_them() -> None:
    parsed = json.loads(SMALL._source.json_text)
    parsed["model"]["vocab"] |= {"<|x|>": 500}
    parsed["model"]["merges"] += [["<", "|x|>"]]
    parsed["added_tokens"].append(added(500, "<|x|>"))
    parsed["model"]["vocab"]["|x|>"] = 501
    for n, (left, right) in enumerate([["|", "x"], ["|x", "|"], ["|x|", ">"]]):
        parsed["model"]["vocab"].setdefault(left + right, 502 + n)
        parsed["model"]["merges"].insert(n, [left, right])
    tokenizer = Tokenizer(TokenizerSource("made", json.dumps(parsed)))
    ids = tokenizer.encode("a<|x|>b")
    assert 500 not in ids
    assert tokenizer.decode(ids) == "a<|x|>b"
