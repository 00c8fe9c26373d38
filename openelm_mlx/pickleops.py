"""A pickle as a stream of opcodes, for ``torchpickle``.

``pickletools.genops`` is not used: it decodes the argument of every opcode, wanted or not, and reads backslash escapes
in the names of globals, which the real unpickler does not.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Iterator
from typing import Any

_NAMES = {
    value: name
    for name, value in vars(pickle).items()
    if name.isupper() and isinstance(value, bytes) and len(value) == 1
}


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self, count: int) -> bytes:
        """The next bytes, whose number the pickle claims: so look before copying."""
        if not 0 <= count <= len(self._data) - self._at:
            raise ValueError(f"it ends early: {count} bytes expected, {len(self._data) - self._at} are there")
        self._at += count
        return self._data[self._at - count : self._at]

    def line(self) -> str:
        end = self._data.find(b"\n", self._at)
        line = self.take(end - self._at)
        self._at += 1
        return line.decode()

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]


def _number(form: str) -> Callable[[_Reader], Any]:
    return lambda reader: reader.number(form)


def _counted(form: str, decode: Callable[[bytes], Any] = bytes) -> Callable[[_Reader], Any]:
    return lambda reader: decode(reader.take(reader.number(form)))


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _integer(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def _nothing(reader: _Reader) -> None:
    return None


_ARGUMENTS: dict[str, Callable[[_Reader], Any]] = {
    **dict.fromkeys(("PROTO", "BININT1", "BINPUT", "BINGET"), _number("<B")),
    **dict.fromkeys(("LONG_BINPUT", "LONG_BINGET"), _number("<I")),
    "BININT2": _number("<H"),
    "BININT": _number("<i"),
    "FRAME": _number("<Q"),
    "BINFLOAT": _number(">d"),
    "LONG1": _counted("<B", _integer),
    "LONG4": _counted("<i", _integer),
    "SHORT_BINUNICODE": _counted("<B", _text),
    "BINUNICODE": _counted("<I", _text),
    "BINUNICODE8": _counted("<Q", _text),
    "SHORT_BINBYTES": _counted("<B"),
    "BINBYTES": _counted("<I"),
    "BINBYTES8": _counted("<Q"),
    **dict.fromkeys(("GLOBAL", "INST"), lambda reader: (reader.line(), reader.line())),
}


def opcodes(data: bytes, known: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """Name and argument of each opcode up to STOP; GLOBAL's argument is a pair of texts, another's is a number or text.

    An opcode that is not in ``known`` comes without its argument, and what follows it means nothing: stop there. Raises
    ValueError if the pickle ends early or has a byte that is no opcode.
    """
    reader, name = _Reader(data), ""
    while name != "STOP":
        code = reader.take(1)
        if code not in _NAMES:
            raise ValueError(f"no opcode is {code!r}")
        name = _NAMES[code]
        yield name, _ARGUMENTS.get(name, _nothing)(reader) if name in known else None
