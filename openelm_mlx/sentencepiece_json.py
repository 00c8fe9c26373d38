"""A SentencePiece ``tokenizer.model`` as a ``tokenizer.json`` that gives the same ids.

The model file is a protobuf message (sentencepiece_model.proto in the SentencePiece sources). The few fields needed are
read here directly, so that no protobuf package is required; SentencePiece itself then checks the result.
"""

from __future__ import annotations

import json
import re
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from openelm_mlx.errors import TokenizerError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_ALGORITHMS = {1: "unigram", 2: "BPE", 3: "word", 4: "character"}
_WAY_OUT = "give the model's tokenizer.json instead"


@dataclass(frozen=True)
class SentencePieceModel:
    """The facts of a model file that decide about ids; the index of a piece is its id."""

    pieces: tuple[str, ...]
    scores: tuple[float, ...]
    types: tuple[int, ...]
    algorithm: str = "unigram"
    byte_fallback: bool = False
    space_as_suffix: bool = False
    normalization: str = ""
    changes_characters: bool = False
    """The normalizer maps characters (NFKC and the like), so the text tokenized is not the text given."""
    dummy_prefix: bool = True
    squeezes_spaces: bool = True
    escapes_spaces: bool = True


def parse_model(data: bytes) -> SentencePieceModel:
    """Read a ``tokenizer.model``.

    Raises:
        TokenizerError: `data` is no SentencePiece model.
    """
    pieces, trainer, normalizer = [], {}, {}
    try:
        for field, value in _fields(data):
            if field == 1:
                pieces.append(_piece(value))
            elif field == 2:
                trainer = dict(_fields(value))
            elif field == 3:
                normalizer = dict(_fields(value))
        if not pieces:
            raise ValueError("no pieces")
        return SentencePieceModel(
            pieces=tuple(text for text, _, _ in pieces),
            scores=tuple(score for _, score, _ in pieces),
            types=tuple(kind for _, _, kind in pieces),
            algorithm=_ALGORITHMS.get(trainer.get(3, 1), "unknown"),
            byte_fallback=bool(trainer.get(35, 0)),
            space_as_suffix=bool(trainer.get(24, 0)),
            normalization=normalizer.get(1, b"").decode() or "unnamed",
            changes_characters=bool(normalizer.get(2) or normalizer.get(6)),
            dummy_prefix=bool(normalizer.get(3, 1)),
            squeezes_spaces=bool(normalizer.get(4, 1)),
            escapes_spaces=bool(normalizer.get(5, 1)),
        )
    except (ValueError, TypeError, AttributeError, IndexError, struct.error) as error:
        raise TokenizerError(
            f"found data beginning with {data[:16]!r}; expected a SentencePiece model, a protobuf message ({error})"
        ) from None


def _piece(message: bytes) -> tuple[str, float, int]:
    fields = dict(_fields(message))
    score = struct.unpack("<f", fields[2])[0] if 2 in fields else 0.0
    return fields[1].decode() if 1 in fields else "", score, fields.get(3, NORMAL)


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of each field of a protobuf message; the value is an int or the field's bytes."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        wire = key & 7
        if wire == 0:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        if wire == 2:
            size, at = _varint(message, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire} at byte {at}")
        if at + size > len(message):
            raise ValueError(f"a field at byte {at} reaches past the end")
        yield key >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError(f"a number at byte {at} is too long")


def sentencepiece_to_json(data: bytes) -> str:
    """The text of a ``tokenizer.json`` that gives the ids the SentencePiece BPE model `data` gives.

    The unknown and control pieces become special tokens; BOS is added by the post-processor when the model has one.
    A model with user-defined symbols gives the same ids except for a text that is one such symbol and nothing else
    (SentencePiece puts its dummy prefix before it, the result here does not).

    Raises:
        TokenizerError: `data` is no SentencePiece model, is of a kind that cannot be expressed exactly, or the ids of
            the result differ from SentencePiece's on any of the strings the self-check tries.
    """
    model = parse_model(data)
    _refuse_inexact(model)
    processor = _load_processor(data)
    result = json.dumps(_tokenizer_dict(model, int(processor.bos_id())), ensure_ascii=False, separators=(",", ":"))
    _self_check(model, processor, result)
    return result


def special_pieces(data: bytes) -> tuple[str | None, str | None]:
    """The BOS and EOS pieces of a SentencePiece model, None where it has none."""
    processor = _load_processor(data)
    bos, eos = (processor.id_to_piece(n) if n >= 0 else None for n in (processor.bos_id(), processor.eos_id()))
    return bos, eos


def _refuse_inexact(model: SentencePieceModel) -> None:
    if model.algorithm != "BPE":
        raise TokenizerError(f"a SentencePiece {model.algorithm} model is not supported, only BPE; {_WAY_OUT}")
    if model.changes_characters:
        raise TokenizerError(f"SentencePiece normalization {model.normalization!r} is not supported; {_WAY_OUT}")
    if model.space_as_suffix or not model.escapes_spaces:
        raise TokenizerError(f"SentencePiece models with spaces as suffixes or unescaped are not supported; {_WAY_OUT}")
    if UNUSED in model.types:
        raise TokenizerError(f"a SentencePiece model with unused pieces is not supported; {_WAY_OUT}")
    if model.types.count(UNKNOWN) != 1:
        raise TokenizerError(f"a SentencePiece model must have one unknown piece, not {model.types.count(UNKNOWN)}")
    if len(set(model.pieces)) != len(model.pieces):
        raise TokenizerError(f"a SentencePiece model with a piece given twice is not supported; {_WAY_OUT}")


def _load_processor(data: bytes) -> Any:
    try:
        import sentencepiece  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        raise TokenizerError(
            "reading a tokenizer.model needs the package sentencepiece: pip install sentencepiece"
        ) from None
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=data)
    except (RuntimeError, ValueError) as error:
        raise TokenizerError(f"SentencePiece cannot load this model: {error}") from None


def _merges(model: SentencePieceModel) -> list[tuple[str, str]]:
    """All pairs of pieces that make a piece, in the order SentencePiece merges them: the best-scored result first.

    SentencePiece merges any two neighbours whose union is a piece, so every split of a piece is a merge.
    """
    normal = {piece: score for piece, score, kind in _rows(model) if kind == NORMAL}
    ranked: list[tuple[float, int, str, str]] = []
    results: Counter[float] = Counter()
    for number, (piece, score) in enumerate(normal.items()):
        splits = [(piece[:n], piece[n:]) for n in range(1, len(piece))]
        known = [(left, right) for left, right in splits if left in normal and right in normal]
        _refuse_bare_characters(piece, splits, normal)
        ranked += [(-score, number, left, right) for left, right in known]
        results[score] += bool(known)
    if any(count > 1 for count in results.values()):
        # Between equal scores SentencePiece takes the leftmost pair, which a fixed order of merges cannot say.
        raise TokenizerError(
            f"this SentencePiece model scores several pieces alike, which is not supported; {_WAY_OUT}"
        )
    ranked.sort(key=lambda merge: merge[:2])
    return [(left, right) for _, _, left, right in ranked]


def _refuse_bare_characters(piece: str, splits: list[tuple[str, str]], normal: dict[str, float]) -> None:
    """SentencePiece merges characters that are no pieces themselves; a list of merges cannot."""
    for left, right in splits:
        sides = [side for side in (left, right) if side not in normal]
        if sides and all(len(side) == 1 for side in sides):
            raise TokenizerError(
                f"the SentencePiece piece {piece!r} is made of {sides[0]!r}, which is no piece itself; {_WAY_OUT}"
            )


def _rows(model: SentencePieceModel) -> Iterator[tuple[str, float, int]]:
    return zip(model.pieces, model.scores, model.types, strict=True)


def _tokenizer_dict(model: SentencePieceModel, bos_id: int) -> dict[str, Any]:
    strips = model.dummy_prefix or model.squeezes_spaces
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if strips:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(model),
        "normalizer": _normalizer(model),
        "pre_tokenizer": None,
        "post_processor": _post_processor(model.pieces[bos_id], bos_id) if bos_id >= 0 else None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": model.pieces[model.types.index(UNKNOWN)],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": model.byte_fallback,
            "ignore_merges": False,
            "vocab": {piece: number for number, piece in enumerate(model.pieces)},
            "merges": _merges(model),
        },
    }


def _added_tokens(model: SentencePieceModel) -> list[dict[str, Any]]:
    """Control pieces as special tokens; user-defined symbols as text that is matched before anything is merged.

    The symbols are matched in the normalized text when there is a dummy prefix: cut out of the raw text, each part
    between them would get a prefix of its own.
    """
    flags = {"single_word": False, "lstrip": False, "rstrip": False}
    return [
        {"id": number, "content": piece, **flags, "normalized": kind == USER_DEFINED, "special": kind != USER_DEFINED}
        for number, (piece, _, kind) in enumerate(_rows(model))
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]


def _normalizer(model: SentencePieceModel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = []
    if model.squeezes_spaces:
        steps.append({"type": "Replace", "pattern": {"Regex": r"\A +| +\z"}, "content": ""})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    symbols = [piece for piece, _, kind in _rows(model) if kind == USER_DEFINED]
    if model.dummy_prefix and symbols:
        # The symbols themselves go through the normalizer too when they are registered, and must stay as they are.
        alone = "|".join(re.escape(symbol) for symbol in symbols)
        steps.append({"type": "Replace", "pattern": {"Regex": rf"\A(?!(?:{alone})\z)"}, "content": "▁"})
    elif model.dummy_prefix:
        steps.append({"type": "Prepend", "prepend": "▁"})
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})
    return {"type": "Sequence", "normalizers": steps}


def _post_processor(bos: str, bos_id: int) -> dict[str, Any]:
    def token(type_id: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": bos, "type_id": type_id}}

    def sequence(name: str, type_id: int) -> dict[str, Any]:
        return {"Sequence": {"id": name, "type_id": type_id}}

    return {
        "type": "TemplateProcessing",
        "single": [token(0), sequence("A", 0)],
        "pair": [token(0), sequence("A", 0), token(1), sequence("B", 1)],
        "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
    }


_BATTERY = (
    "Hello world",
    " leading, trailing ",
    "  two   three    four",
    "tabs\tand\nnewlines\n\n\r\n",
    "def f(x):\n    return x + 1\n",
    "naïve café, 日本語のテキスト, العربية, 🙂👩‍👩‍👧",
    "<unk> <s>a</s> <|user|>\nhi</s>\n <0x0A> ▁a▁▁b",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaa 1234567890 ============= ........",
    "\x00\x7f\u00a0\u2028\ufeff",
    " ",
    "",
)


def _self_check(model: SentencePieceModel, processor: Any, result: str) -> None:
    from tokenizers import Tokenizer

    try:
        converted = Tokenizer.from_str(result)
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"this SentencePiece model cannot be converted: {error}; {_WAY_OUT}") from None
    converted.encode_special_tokens = True
    for text in (*_BATTERY, *_glued_pieces(model)):
        expected, got = processor.encode(text), converted.encode(text, add_special_tokens=False).ids
        if list(expected) != got:
            raise TokenizerError(
                f"the converted tokenizer differs from SentencePiece on {text!r}: "
                f"{got} instead of {list(expected)}; {_WAY_OUT}"
            )


def _glued_pieces(model: SentencePieceModel) -> Iterator[str]:
    """A few thousand pieces of the vocabulary in an order far from its own, ten a string."""
    texts = [piece.replace("▁", " ") for piece, _, kind in _rows(model) if kind in (NORMAL, USER_DEFINED)]
    stride = next(n for n in (7919, 7907, 1) if len(texts) % n) if texts else 1
    mixed = [texts[n * stride % len(texts)] for n in range(min(len(texts), 3000))]
    for at in range(0, len(mixed), 10):
        yield "".join(mixed[at : at + 10])
