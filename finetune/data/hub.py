"""Records of a Hub data set, through the `datasets` library (extra ``data``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from openelm_mlx.finetune.data.records import DataError, Record

PREFIX = "hf:"


class HubRecords(Iterator[Record]):
    """The rows of one split, in order; ``where`` names data set, split and row, counted from 1."""

    def __init__(self, name: str, split: str, rows: Any) -> None:
        self.name = f"{PREFIX}{name} ({split})"
        self.total = len(rows)
        """Rows in the split."""
        self.done = 0
        """Rows read so far."""
        self._rows = iter(rows)

    def close(self) -> None:
        """Let go of the data set: there are no more records."""
        self._rows = iter(())

    def __next__(self) -> Record:
        row = next(self._rows)
        self.done += 1
        # Rows have every column of the data set: null is how they say that a record has no such key.
        return Record(f"{self.name} row {self.done}", {key: value for key, value in row.items() if value is not None})


def hub_splits(data: str) -> dict[str, HubRecords]:
    """The splits of ``hf:NAME`` or ``hf:NAME:CONFIG`` under the names they have there; fetched when not in the cache.

    Raises:
        DataError: `datasets` is not installed, or cannot load it.
    """
    name, _, config = data.removeprefix(PREFIX).partition(":")
    if not name:
        raise DataError(f"{data}: names no data set; write hf:NAME, or hf:NAME:CONFIG")
    try:
        import datasets  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        raise DataError(f"{data}: Hub data sets need the package datasets: pip install 'openelm-mlx[data]'") from None
    try:
        loaded = datasets.load_dataset(name, config or None)
    except Exception as e:  # the library, and what it runs, raise anything
        reason = " ".join(str(e).split()) or type(e).__name__
        raise DataError(f"{data}: datasets cannot load it: {reason}") from None
    return {split: HubRecords(name, split, rows) for split, rows in loaded.items()}
