"""Records from files: JSON Lines or one JSON array, told apart by content, plain or compressed by gzip.

JSON Lines are read line by line; an array is read whole.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from openelm_mlx.errors import OpenELMError
from openelm_mlx.files import is_there

_LONGEST_LINE = 1 << 28
"""Bytes; a line beyond this is no record."""
_GZIP = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"
_OTHERS = {
    b"PAR1": "a Parquet file",
    b"PK\x03\x04": "a zip file",
    b"\x28\xb5\x2f\xfd": "a file compressed by zstd",
    b"BZh": "a file compressed by bzip2",
    b"\xfd7zXZ": "a file compressed by xz",
    b"\xff\xfe": "UTF-16 text, where UTF-8 is needed",
    b"\xfe\xff": "UTF-16 text, where UTF-8 is needed",
    b"version https://git-lfs": "a Git LFS pointer (fetch the file itself with `git lfs pull`)",
    b"<": "a web page",
}
_FORMS = "JSON Lines (one object a line) or one JSON array of objects is needed"


class DataError(OpenELMError):
    """The data cannot be read, or not be trained on."""


def bad_record(where: str, problem: object) -> DataError:
    """What to raise for a record that is no example, where such are not skipped."""
    return DataError(f"{where}: {problem}; --skip-bad-lines counts such lines instead")


@dataclass(frozen=True)
class Record:
    """One entry of a file or data set, or what is wrong with it."""

    where: str
    """File and line, ``my.jsonl:17``; in an array the entry too, ``my.json:17 (entry 4)``."""
    values: dict[str, Any]
    problem: str = ""
    """Why there are no values."""


class Records(Iterator[Record]):
    """The records of a file, in order.

    Raises:
        DataError: the file cannot be read on; also while iterating. An entry that is unreadable by itself is a record
            with a `problem` instead.
    """

    def __init__(self, path: Path, *, start: int = 0) -> None:
        """Read `path` from its record number `start` on, counted from 0."""
        if not is_there(path, DataError):
            raise DataError(f"{path}: no such file")
        self.name = str(path)
        """For messages."""
        self.position = 0
        """The number of records passed."""
        try:
            self.total = path.stat().st_size
            """Bytes in the file."""
        except OSError as e:
            raise DataError(f"{path}: cannot be read: {e.strerror or e}") from None
        self._path = path
        self._file: BufferedReader | None = None
        self._line = 0
        self._records = self._read()
        for _ in range(start):
            if next(self, None) is None:
                raise DataError(f"{path}: has {self.position} records, so none can be read from number {start} on")

    @property
    def done(self) -> int:
        """Bytes read so far."""
        return 0 if self._file is None else self.total if self._file.closed else self._file.tell()

    def __next__(self) -> Record:
        record = next(self._records)
        self.position += 1
        return record

    def close(self) -> None:
        """Close the file: there are no more records."""
        self._records.close()

    def _read(self) -> Generator[Record, None, None]:
        try:
            with self._path.open("rb") as self._file:
                yield from self._all(self._file)
        except (EOFError, zlib.error, gzip.BadGzipFile) as e:
            raise DataError(f"{self.name}:{self._line + 1}: the gzip data is damaged from here on: {e}") from None
        except OSError as e:
            raise DataError(f"{self.name}: cannot be read: {e.strerror or e}") from None

    def _all(self, file: BufferedReader) -> Iterator[Record]:
        packed = file.peek(2).startswith(_GZIP)
        stream: BufferedReader | gzip.GzipFile = gzip.GzipFile(fileobj=file) if packed else file
        at_start = True
        while line := stream.readline(_LONGEST_LINE + 1):
            if self._line == 0:
                line = line.removeprefix(_BOM)
                self._refuse_others(line)
            if line.strip() and at_start and line.lstrip().startswith(b"["):
                yield from self._array(line + stream.read())
                return
            self._line += 1
            if len(line) > _LONGEST_LINE:
                raise DataError(f"{self.name}:{self._line}: has over {_LONGEST_LINE:,} bytes without a line's end")
            if line.strip():
                at_start = False
                yield self._of_line(line)

    def _refuse_others(self, beginning: bytes) -> None:
        for magic, what in _OTHERS.items():
            if beginning.startswith(magic):
                raise DataError(f"{self.name}: is {what}; {_FORMS}")

    def _of_line(self, line: bytes) -> Record:
        where = f"{self.name}:{self._line}"
        try:
            return _checked(where, json.loads(line.decode("utf-8")))
        except json.JSONDecodeError as e:
            text = e.doc.strip()
            if not text.startswith("{"):
                return Record(where, {}, f"begins no JSON object: {_short(text)}")
            if e.pos >= len(e.doc.rstrip()) or e.msg.startswith("Unterminated"):
                return Record(where, {}, "the line ends before its JSON object does")
            return Record(where, {}, _reason(e))
        except (ValueError, RecursionError) as e:
            return Record(where, {}, _reason(e))

    def _array(self, data: bytes) -> Iterator[Record]:
        first = self._line + 1
        try:
            entries = _Entries(data.decode("utf-8"))
        except UnicodeDecodeError as e:
            line = first + data.count(b"\n", 0, e.start)
            raise DataError(f"{self.name}:{line}: {_reason(e)}") from None
        number = 0
        try:
            for number, value in enumerate(entries, 1):
                yield _checked(f"{self.name}:{first + entries.line} (entry {number})", value)
        except (ValueError, RecursionError) as e:
            line = first + (e.lineno - 1 if isinstance(e, json.JSONDecodeError) else entries.line)
            after = f"after its entry {number}" if number else "at its beginning"
            raise DataError(f"{self.name}:{line}: the array cannot be read {after}: {_reason(e)}") from None


class _Entries:
    """The entries of a text that is one JSON array, one after another.

    Raises:
        ValueError, RecursionError: while iterating; the text is something else.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self.line = 0
        """The line that reading has come to, counted from 0."""

    def __iter__(self) -> Iterator[Any]:
        decode = json.JSONDecoder().raw_decode
        self._skip("[")
        mark = self._peek()
        while mark != "]":
            value, end = decode(self._text, self._at)
            yield value
            self._move(end)
            mark = self._peek()
            if mark != "]":
                self._skip(",")
                self._peek()
        self._skip("]")
        if self._peek():
            raise ValueError("there is more after the array's end")

    def _peek(self) -> str:
        """The next character that is no white space; none at the end."""
        at = self._at
        while self._text[at : at + 1] in (" ", "\t", "\r", "\n"):
            at += 1
        self._move(at)
        return self._text[at : at + 1]

    def _skip(self, mark: str) -> None:
        if (found := self._peek()) != mark:
            wanted = "a comma or ]" if mark == "," else mark
            raise ValueError(f"{wanted} is needed, not {found!r}" if found else "the text ends inside the array")
        self._move(self._at + 1)

    def _move(self, at: int) -> None:
        self.line += self._text.count("\n", self._at, at)
        self._at = at


_KINDS = {list: "an array", str: "a string", int: "a number", float: "a number", bool: "true or false"}


def kind(value: object) -> str:
    """What a value is in JSON, for messages."""
    return "null" if value is None else "an object" if isinstance(value, dict) else _KINDS.get(type(value), "no text")


def _checked(where: str, value: Any) -> Record:
    if isinstance(value, dict):
        return Record(where, value)
    return Record(where, {}, f"a JSON object is needed, not {kind(value)}")


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not readable as JSON: {error.msg[:1].lower()}{error.msg[1:]} (column {error.colno})"
    if isinstance(error, UnicodeDecodeError):
        column = error.start - error.object.rfind(b"\n", 0, error.start)
        return f"not UTF-8 text: byte 0x{error.object[error.start]:02x} at byte {column} of the line"
    return "nested too deep" if isinstance(error, RecursionError) else str(error)


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:40]}…")
