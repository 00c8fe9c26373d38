"""Texts of files of every kind: whole text files, JSON Lines and arrays, Parquet; plain or compressed by gzip."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

from openelm_mlx.files import is_there
from openelm_mlx.finetune.data.records import DataError, Record, Records, kind

_PLAIN = (".txt", ".md", ".text")
_JSON = (".jsonl", ".json")
_PARQUET = ".parquet"
ENDINGS = (*_PLAIN, *_JSON, *(f"{ending}.gz" for ending in (*_PLAIN, *_JSON)), _PARQUET)
"""Names of files that texts are read from."""

_LARGEST = 1 << 30
"""Bytes of a text file, which is one text."""


class _Source(Protocol):
    total: int

    @property
    def done(self) -> int: ...
    def __next__(self) -> Record: ...
    def close(self) -> None: ...


class Texts(Iterator[Record]):
    """The texts of a file, in order: a record's one value is ``text``, unless it has a problem.

    Args:
        path: of one of the :data:`ENDINGS`.
        key: of the text in JSON records, and the column of Parquet files.
        start: the number of the first text wanted, from 0.

    Raises:
        DataError: the file cannot be read on; also while iterating.
    """

    def __init__(self, path: Path, key: str, *, start: int = 0) -> None:
        self._key = key
        self._source = _open(path, key, start)

    @property
    def total(self) -> int:
        """Size of the file: bytes, or a Parquet file's rows."""
        return self._source.total

    @property
    def done(self) -> int:
        """How much of that has been read."""
        return self._source.done

    def __next__(self) -> Record:
        record = next(self._source)
        if record.problem:
            return record
        if self._key not in record.values:
            shown = ", ".join(repr(k) for k in list(record.values)[:8])
            return Record(record.where, {}, f"has no {self._key!r}, but {shown or 'nothing'} (see --text-key)")
        text = record.values[self._key]
        if not isinstance(text, str):
            return Record(record.where, {}, f"{self._key!r} must be text, not {kind(text)}")
        return Record(record.where, {"text": text})

    def close(self) -> None:
        """Close the file: there are no more texts."""
        self._source.close()


def _open(path: Path, key: str, start: int) -> _Source:
    name = path.name.removesuffix(".gz")
    if name.endswith(_PARQUET):
        return _Parquet(path, key, start)
    return _Whole(path, key, start) if name.endswith(_PLAIN) else Records(path, start=start)


class _Whole:
    """A text file, which is one record."""

    def __init__(self, path: Path, key: str, start: int) -> None:
        if not is_there(path, DataError):
            raise DataError(f"{path}: no such file")
        self.total = path.stat().st_size
        self._path, self._key, self._left = path, key, start == 0

    @property
    def done(self) -> int:
        return 0 if self._left else self.total

    def __next__(self) -> Record:
        if not self._left:
            raise StopIteration
        self._left = False
        return Record(str(self._path), {self._key: self._text()})

    def close(self) -> None:
        self._left = False

    def _text(self) -> str:
        try:
            with self._path.open("rb") as file:
                packed = file.peek(2).startswith(b"\x1f\x8b")
                with gzip.GzipFile(fileobj=file) if packed else file as stream:
                    data = stream.read(_LARGEST + 1)
        except (EOFError, zlib.error, gzip.BadGzipFile) as e:
            raise DataError(f"{self._path}: the gzip data is damaged: {e}") from None
        except OSError as e:
            raise DataError(f"{self._path}: cannot be read: {e.strerror or e}") from None
        if len(data) > _LARGEST:
            raise DataError(f"{self._path}: has over {_LARGEST:,} bytes, too many for one text; make JSON Lines of it")
        try:
            return data.decode("utf-8-sig")
        except UnicodeDecodeError as e:
            line = data.count(b"\n", 0, e.start) + 1
            raise DataError(f"{self._path}:{line}: not UTF-8 text: byte 0x{data[e.start]:02x}") from None


class _Parquet:
    """A column of a Parquet file; rows are read a group at a time."""

    def __init__(self, path: Path, key: str, start: int) -> None:
        if not is_there(path, DataError):
            raise DataError(f"{path}: no such file")
        try:
            import pyarrow.parquet as parquet
        except ImportError:
            raise DataError(
                f"{path}: reading Parquet files needs pyarrow: pip install 'openelm-mlx[parquet]'"
            ) from None
        self._path, self._key = path, key
        try:
            self._file: Any = parquet.ParquetFile(path)
        except Exception as e:  # pyarrow's own classes, OSError among them
            raise DataError(f"{path}: not readable as Parquet: {' '.join(str(e).split())}") from None
        names = self._file.schema_arrow.names
        if key not in names:
            raise DataError(f"{path}: has no column {key!r}, but {', '.join(names)} (--text-key names another)")
        self.total: int = self._file.metadata.num_rows
        self.done = 0
        self._rows = self._read(start)

    def __next__(self) -> Record:
        return next(self._rows)

    def close(self) -> None:
        self._rows.close()

    def _read(self, start: int) -> Generator[Record, None, None]:
        with closing(self._file):
            for group in range(self._file.num_row_groups):
                rows = self._file.metadata.row_group(group).num_rows
                if self.done + rows <= start:
                    self.done += rows
                    continue
                for value in self._column(group):
                    self.done += 1
                    if self.done > start:
                        yield Record(f"{self._path}:{self.done}", {self._key: value})

    def _column(self, group: int) -> list[Any]:
        try:
            values: list[Any] = self._file.read_row_group(group, columns=[self._key]).column(0).to_pylist()
        except Exception as e:
            raise DataError(f"{self._path}: cannot be read on: {' '.join(str(e).split())}") from None
        return values
