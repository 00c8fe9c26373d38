"""Bytes of a piece, and streamed text: joined, the pieces are the whole text for every sequence of ids."""

from __future__ import annotations

import codecs
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openelm_mlx.detokenizer import Decoder, Detokenizer, parse_decoder
from openelm_mlx.errors import TokenizerError

TABLE = [b"", b" ", b"a", b" b", "é".encode(), *(bytes([n]) for n in (0xF0, 0x9F, 0x99, 0x82, 0xC3, 0xA9, 0xE2, 0xFF))]
IDS = st.lists(st.integers(0, len(TABLE) - 1), max_size=12)
LLAMA: list[dict[str, Any]] = [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
]


def sequence(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "decoders": list(parts)}


def streamed(prompt: list[int], ids: list[int], **options: bool) -> str:
    stream = Detokenizer(TABLE.__getitem__, prompt, **options)
    return "".join(stream.add(token) for token in ids) + stream.finish()


def whole(ids: list[int], strips: bool) -> str:
    text = b"".join(TABLE[token] for token in ids).decode("utf-8", errors="replace")
    return text[1:] if strips and text.startswith(" ") else text


def complete_text(ids: list[int]) -> str:
    """The text of the ids without a character whose bytes are not all there."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(TABLE[token] for token in ids))


@given(IDS, st.booleans())
def test_pieces_joined_are_the_whole(ids: list[int], strips: bool) -> None:
    assert streamed([], ids, strips_space=strips) == whole(ids, strips)


@given(IDS, IDS, st.booleans())
def test_after_a_prompt_it_is_the_whole_less_the_prompt(prompt: list[int], ids: list[int], strips: bool) -> None:
    before = complete_text(prompt)
    before = before[1:] if strips and before.startswith(" ") else before
    assert before + streamed(prompt, ids, strips_space=strips) == whole(prompt + ids, strips)


@given(IDS, IDS, st.booleans())
def test_a_chat_reply_loses_one_leading_space(prompt: list[int], ids: list[int], strips: bool) -> None:
    text = whole(prompt + ids, False)[len(complete_text(prompt)) :]
    assert streamed(prompt, ids, strips_space=strips, strip_leading_space=True) == text.removeprefix(" ")


def test_a_split_character_is_held_back() -> None:
    stream = Detokenizer(TABLE.__getitem__)
    assert [stream.add(token) for token in (5, 6, 7, 8, 9)] == ["", "", "", "🙂", ""]
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_a_character_begun_by_the_prompt_is_completed() -> None:
    assert streamed([2, 5, 6], [7, 8, 2]) == "🙂a"


def test_the_leading_space_survives_after_visible_text_only() -> None:
    assert streamed([2], [3], strips_space=True) == " b"
    assert streamed([0], [3], strips_space=True) == "b"
    assert streamed([0], [1, 1, 2], strips_space=True) == " a"


def test_sentencepiece_pieces() -> None:
    decoder = parse_decoder(sequence(*LLAMA))
    assert decoder == Decoder(byte_fallback=True, replacements=(("▁", " "),), strips_space=True)
    pieces = {"▁a▁": b" a ", "<0xE2>": b"\xe2", "<0xe2>": b"\xe2", "<0xE2>\n": b"<0xE2>\n", "é": b"\xc3\xa9", "": b""}
    assert {piece: decoder.piece_bytes(piece) for piece in pieces} == pieces


def test_metaspace_says_whether_the_first_space_is_the_dummy_prefix() -> None:
    def metaspace(**more: object) -> Decoder:
        return parse_decoder(sequence({"type": "Metaspace", "replacement": "_", **more}, {"type": "ByteFallback"}))

    assert metaspace(prepend_scheme="first").strips_space
    assert metaspace(prepend_scheme="always").strips_space
    assert not metaspace(prepend_scheme="never").strips_space
    assert not metaspace(add_prefix_space=False).strips_space
    assert metaspace().piece_bytes("_a") == b" a"


def test_byte_level_pieces() -> None:
    decoder = parse_decoder({"type": "ByteLevel", "add_prefix_space": True})
    assert decoder.piece_bytes("ĠaÃ©Ċ") == " aé\n".encode()
    assert decoder.piece_bytes("日") == "日".encode()  # no piece of that alphabet
    assert decoder.added_bytes("é") == "é".encode()
    assert not decoder.strips_space


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (None, "none"),
        ({"type": "WordPiece"}, "WordPiece"),
        (sequence({"type": "ByteFallback"}, {"type": "CTC"}), "CTC"),
        (sequence({"type": "ByteLevel"}, {"type": "ByteFallback"}), "ByteLevel"),
        (sequence({"type": "Replace", "pattern": {"Regex": "a+"}, "content": ""}), "Replace"),
        (sequence(LLAMA[0], LLAMA[3]), "before Fuse"),
        (sequence({"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 0, "stop": 1}), "Strip"),
    ],
)
def test_other_decoders_are_refused_by_name(spec: object, named: str) -> None:
    with pytest.raises(TokenizerError, match=named):
        parse_decoder(spec)
