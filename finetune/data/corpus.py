"""Plain text from many files: which there are, how they are mixed, and reading them again and again from any place."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from openelm_mlx.atomic import OutputError
from openelm_mlx.files import expand
from openelm_mlx.finetune.data.batches import permutation
from openelm_mlx.finetune.data.hub import PREFIX
from openelm_mlx.finetune.data.records import DataError, Record
from openelm_mlx.finetune.data.splits import in_folder
from openelm_mlx.finetune.data.textfiles import ENDINGS, Texts
from openelm_mlx.settings import whole_number


@dataclass(frozen=True)
class TextSource:
    """Files that belong together, and their share of the tokens trained on."""

    name: str
    files: tuple[Path, ...]
    weight: float = 1.0


@dataclass(frozen=True)
class Corpus:
    """The sources to train on, and the files to validate and test on, if any."""

    train: tuple[TextSource, ...]
    valid: TextSource | None
    test: TextSource | None

    @property
    def files(self) -> tuple[Path, ...]:
        """All files."""
        sources = (*self.train, *(s for s in (self.valid, self.test) if s))
        return tuple(path for source in sources for path in source.files)


def find_corpus(data: str | None, valid: str | None, test: str | None) -> Corpus:
    """The files of texts that the settings name.

    A folder with ``train.jsonl`` (or .txt, .parquet, ... or a folder of that name) and perhaps ``valid`` and ``test``
    is split so. Of another folder all files with one of the endings of `textfiles` are trained on, those of its folders
    too.

    Raises:
        DataError: nothing is named or there, or a weight is no positive number.
    """
    if data is None:
        raise DataError("there is no data: name a file or a folder with --data")
    if data.startswith(PREFIX):
        raise DataError(f"{data}: a data set of the Hub cannot be streamed; save it as Parquet or JSON Lines first")
    named: dict[str, TextSource] = {}
    train: list[TextSource] = []
    for text, weight in weighted_paths(data):
        path = expand(text)
        splits = _splits(path) if path.is_dir() else {"train": _files_of(path)}
        train.append(TextSource(text, splits["train"], weight))
        for split in ("valid", "test"):
            if split in splits:
                files = (*named[split].files, *splits[split]) if split in named else splits[split]
                named[split] = TextSource(f"{text}: {split}", files)
    for split, told in (("valid", valid), ("test", test)):
        if told is not None:
            named[split] = TextSource(told, _files_of(expand(told)))
    return Corpus(tuple(train), named.get("valid"), named.get("test"))


def require_outside(out: Path, data: str) -> None:
    """Refuse an output folder among texts: whoever reads them next would read its files as some.

    Raises:
        OutputError: it lies in a folder of which all texts are trained on, whatever their names.
        DataError: as :func:`find_corpus`.
    """
    folders = [path for name, _ in weighted_paths(data) if (path := expand(name)).is_dir()]
    for path in (path for path in folders if not in_folder(path, ENDINGS)["train"]):
        folder = path / "train" if (path / "train").is_dir() else path
        if folder.resolve() in out.resolve().parents:
            raise OutputError(f"{out}: lies in {folder}, all files of which are trained on; name another --out")


def weighted_paths(data: str) -> list[tuple[str, float]]:
    """``books=0.7,web.jsonl=0.3`` as pairs; a path alone has the weight 1.

    Raises:
        DataError: a weight is no positive number, or a path is there twice.
    """
    if expand(data).exists():  # whatever characters are in its name
        return [(data, 1.0)]
    found: list[tuple[str, float]] = []
    parts = data.split(",")
    for part in parts:
        path, equals, weight = part.strip().rpartition("=")
        if not equals:
            path, weight = weight, "1"
        try:
            value = float(weight)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise DataError(f"--data: the weight of {path!r} must be a positive number, not {weight!r}")
        if not path:
            raise DataError(f"--data: {data}: has a source without a name")
        if path in dict(found):
            raise DataError(f"--data: names {path!r} twice")
        found.append((path, value))
    if 0 < sum("=" in part for part in parts) < len(parts):
        raise DataError(f"--data: {data}: give every source a weight, or none")
    return found


def _files_of(path: Path) -> tuple[Path, ...]:
    if not path.is_dir():
        if not path.name.endswith(ENDINGS):
            raise DataError(f"{path}: {_UNKNOWN if path.exists() else 'no such file or folder'}")
        if not path.exists():
            raise DataError(f"{path}: no such file")
        return (path,)
    found = sorted(p for p in path.rglob("*") if p.name.endswith(ENDINGS) and p.is_file())
    if not found:
        raise DataError(f"{path}: has no file of texts; their names end in {', '.join(ENDINGS)}")
    return tuple(found)


_UNKNOWN = f"is no file of texts; their names end in {', '.join(ENDINGS)}"


def _splits(folder: Path) -> dict[str, tuple[Path, ...]]:
    found: dict[str, tuple[Path, ...]] = {}
    for split, there in in_folder(folder, ("", *ENDINGS)).items():
        if len(there) > 1:
            raise DataError(f"{folder}: has {' and '.join(p.name for p in there)}, and only one can be {split}")
        if there:
            found[split] = _files_of(there[0])
    if "train" not in found:
        if found:
            raise DataError(
                f"{folder}: has no texts to train on beside {', '.join(found)}: train.jsonl, train.txt, ..."
            )
        found["train"] = _files_of(folder)
    return found


def texts_of(source: TextSource, key: str) -> Iterator[tuple[Record, float]]:
    """The texts of a source once, in order; with each, which part of the source has been read with it."""
    for number, path in enumerate(source.files):
        with closing(Texts(path, key)) as texts:
            for record in texts:
                yield record, (number + texts.done / max(texts.total, 1)) / len(source.files)


def held_out(text: str, seed: int, fraction: float) -> bool:
    """Whether a text is kept for validation: a matter of what it says and the seed, not of where it stands."""
    digest = hashlib.blake2b(f"{seed}:{text}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


@dataclass
class Place:
    """Where reading a source stands."""

    epoch: int = 0
    file: int = 0
    """In this epoch's order."""
    record: int = 0
    """In that file."""


class Reader:
    """The texts of a source without end: in each epoch all of them, in an order of files of its own.

    Raises:
        DataError: while reading; a file cannot be read, or there is no text in any.
    """

    def __init__(self, source: TextSource, key: str, seed: int) -> None:
        self.source = source
        self.place = Place()
        """Of the next text."""
        self._key, self._seed = key, seed
        self._order: tuple[int, list[int]] = (-1, [])
        self._open: Texts | None = None
        self._ahead: Record | None = None

    def __next__(self) -> Record:
        record = self._ahead or self._first()
        self._ahead = None
        self.place.record += 1
        while self._ahead is None and self._open is not None:  # so that the place is known to be an epoch's beginning
            self._ahead = next(self._open, None)
            if self._ahead is None:
                self._to_next_file()
        return record

    def _first(self) -> Record:
        """The record at the place, or the first one after it in this epoch."""
        epoch = self.place.epoch
        while self.place.epoch == epoch:
            if self._open is None:
                self._open = Texts(self._file(), self._key, start=self.place.record)
            record = next(self._open, None)
            if record is not None:
                return record
            self._to_next_file()
        raise DataError(f"{self.source.name}: has no texts")

    def _to_next_file(self) -> None:
        self._close()
        if self.place.file + 1 == len(self.source.files):
            self.place = Place(self.place.epoch + 1)
        else:
            self.place = Place(self.place.epoch, self.place.file + 1)
            self._open = Texts(self._file(), self._key)

    @property
    def state(self) -> dict[str, int]:
        """The place as plain values."""
        return asdict(self.place)

    def seek(self, state: dict[str, Any]) -> None:
        """Go on from a state that was told earlier."""
        self._close()
        values = {name: whole_number(f"position: {name}", state.get(name), 0) for name in ("epoch", "file", "record")}
        if values["file"] >= len(self.source.files):
            raise DataError(f"{self.source.name}: has fewer files than when the position was saved")
        self.place = Place(**values)

    def _file(self) -> Path:
        epoch = self.place.epoch
        if self._order[0] != epoch:
            random = np.random.PCG64(np.random.SeedSequence((self._seed, epoch)))
            self._order = (epoch, permutation(random, len(self.source.files)))
        return self.source.files[self._order[1][self.place.file]]

    def _close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None
            self._ahead = None


def least_read(drawn: Sequence[int], weights: Sequence[float]) -> int:
    """Which source the next text comes from: the one furthest behind its share of the tokens."""
    return min(range(len(weights)), key=lambda n: (drawn[n] / weights[n], n))
