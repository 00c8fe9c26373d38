"""From token ids back to text, byte by byte, so that a text decoded whole and a text streamed can never differ.

Every id stands for fixed bytes; a text is those bytes joined and read as UTF-8. This module turns a tokenizer.json's
decoder into that table and holds the incremental reader.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from openelm_mlx.errors import TokenizerError

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
_SUPPORTED = "ByteLevel, Metaspace, and sequences of Replace, ByteFallback, Fuse and Strip(' ')"


@dataclass(frozen=True)
class Decoder:
    """What a tokenizer.json's ``decoder`` says about turning one vocabulary piece into bytes."""

    byte_level: bool = False
    """Pieces are written in the byte-level alphabet of GPT-2."""
    byte_fallback: bool = False
    """A piece ``<0xNN>`` is the byte NN."""
    replacements: tuple[tuple[str, str], ...] = ()
    """Strings replaced in every piece, in this order (``▁`` by a space)."""
    strips_space: bool = False
    """One space at the very beginning of a text is not part of it (it is the dummy prefix)."""

    def piece_bytes(self, piece: str) -> bytes:
        """The bytes the vocabulary piece `piece` stands for."""
        if self.byte_level:
            table = _byte_level_alphabet()
            if all(char in table for char in piece):
                return bytes(table[char] for char in piece)
            return piece.encode("utf-8")
        if self.byte_fallback and (match := _BYTE_PIECE.match(piece)):
            return bytes.fromhex(match[1])
        for old, new in self.replacements:
            piece = piece.replace(old, new)
        return piece.encode("utf-8")

    def added_bytes(self, content: str) -> bytes:
        """The bytes of an added token that is ordinary text: itself, never read in the byte-level alphabet."""
        return content.encode("utf-8") if self.byte_level else self.piece_bytes(content)


@cache
def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes for the characters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


def parse_decoder(spec: object) -> Decoder:
    """Read the ``decoder`` of a tokenizer.json.

    Raises:
        TokenizerError: the decoder is missing, or has a part that does not turn each piece into fixed bytes.
    """
    parts = _flatten(spec)
    kinds = [str(part.get("type")) for part in parts]
    if "ByteLevel" in kinds:
        if set(kinds) - {"ByteLevel", "Fuse"}:
            raise _unsupported("+".join(kinds))
        return Decoder(byte_level=True)
    replacements: list[tuple[str, str]] = []
    strips = False
    for number, (part, kind) in enumerate(zip(parts, kinds, strict=True)):
        if kind == "Replace":
            replacements.append(_replacement(part))
        elif kind == "Metaspace":
            replacements.append((str(part.get("replacement", "▁")), " "))
            strips = strips or _metaspace_prefixes(part)
        elif kind == "Strip":
            # Before a Fuse it would strip every token, not the text.
            strips = _strips_one_space(part, fused="Fuse" in kinds[:number]) or strips
        elif kind not in ("ByteFallback", "Fuse"):
            raise _unsupported(kind)
    return Decoder(byte_fallback="ByteFallback" in kinds, replacements=tuple(replacements), strips_space=strips)


def _flatten(spec: object) -> list[dict[str, Any]]:
    if not isinstance(spec, dict):
        raise _unsupported("none")
    if spec.get("type") != "Sequence":
        return [spec]
    return [part for child in spec.get("decoders") or [None] for part in _flatten(child)]


def _replacement(part: dict[str, Any]) -> tuple[str, str]:
    pattern = part.get("pattern")
    if not isinstance(pattern, dict) or not isinstance(pattern.get("String"), str):
        raise _unsupported(f"Replace with the pattern {pattern!r}")
    return pattern["String"], str(part.get("content", ""))


def _metaspace_prefixes(part: dict[str, Any]) -> bool:
    if "prepend_scheme" in part:
        return bool(part["prepend_scheme"] != "never")
    return bool(part.get("add_prefix_space", True))


def _strips_one_space(part: dict[str, Any], *, fused: bool) -> bool:
    content, start, stop = part.get("content"), part.get("start", 0), part.get("stop", 0)
    if start == 0 and stop == 0:
        return False
    if content != " " or start != 1 or stop != 0 or not fused:
        raise _unsupported(f"Strip(content={content!r}, start={start}, stop={stop}{'' if fused else ', before Fuse'})")
    return True


def _unsupported(kind: str) -> TokenizerError:
    return TokenizerError(
        f"tokenizer.json has the decoder {kind}, which cannot be decoded byte by byte; supported: {_SUPPORTED}"
    )


class Detokenizer:
    """Turns ids into text one at a time: the text of ``prompt`` + ids, less the text of ``prompt``.

    A character whose bytes are not all there yet is held back, and one begun by the prompt is completed. The pieces
    returned, joined, are the whole text for every sequence of ids; bytes that are no UTF-8 become U+FFFD.

    Args:
        token_bytes: the bytes of an id.
        prompt: the ids before the first one added.
        strips_space: the tokenizer drops one space at the very beginning of a text; applies when the prompt has no
            bytes of its own.
        strip_leading_space: drop one leading space of the generated text in any case (a chat reply).
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        prompt: Iterable[int] = (),
        *,
        strips_space: bool = False,
        strip_leading_space: bool = False,
    ) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        before = b"".join(map(token_bytes, prompt))
        self._utf8.decode(before)
        self._drop_space = strip_leading_space or (strips_space and not before)

    def add(self, token: int) -> str:
        """The text that is complete after `token` and has not been returned yet; often empty."""
        return self._emit(self._utf8.decode(self._token_bytes(token)))

    def finish(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character, else nothing."""
        return self._emit(self._utf8.decode(b"", final=True))

    def _emit(self, text: str) -> str:
        if text and self._drop_space:
            self._drop_space = False
            return text[1:] if text[0] == " " else text
        return text
