"""Batches from texts that are read, tokenized and cut into rows while training."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from openelm_mlx.errors import OpenELMError, TokenizerError
from openelm_mlx.finetune.data.batches import Batches
from openelm_mlx.finetune.data.corpus import Reader, TextSource, least_read
from openelm_mlx.finetune.data.encoding import Encoder
from openelm_mlx.finetune.data.formats import Text
from openelm_mlx.finetune.data.records import DataError, Record, bad_record
from openelm_mlx.finetune.data.types import Batch, Encoded
from openelm_mlx.finetune.settings import Settings
from openelm_mlx.settings import whole_number

TOKENS = 1 << 22
"""Tokens of a window, whose rows are shuffled: 16 MB as numbers of 32 bits."""


class TextFilter:
    """What becomes of a text: normalized, left out, or tokens with BOS and EOS; counts what it leaves out.

    Source: CoreNet's general_lm.py and openelm_270M.yaml (NFC, 200 characters, 256 tokens).
    """

    def __init__(self, settings: Settings, encoder: Encoder, check: Callable[[Encoded], None] = lambda _: None) -> None:
        self._s = settings
        self._encoder = encoder
        self._check = check
        self.bad = 0
        self.first_bad = ""
        self.short = 0

    def text(self, record: Record) -> str | None:
        """The normalized text; None if it has too few characters.

        Raises:
            DataError: there is none in the record, and such are not skipped.
        """
        if record.problem:
            self._bad(record.where, record.problem)
            return None
        text = str(record.values["text"])
        text = unicodedata.normalize("NFC", text) if self._s.nfc else text
        if len(text) < max(self._s.min_characters, 1):
            self.short += 1
            return None
        return text

    def encode(self, text: str, where: str) -> Encoded | None:
        """Its tokens; None if they are too few."""
        try:
            encoded = self._encoder.encode(Text(text), where)
        except TokenizerError as e:
            self._bad(where, str(e))
            return None
        if encoded is None or len(encoded.ids) < self._s.min_tokens:
            self.short += 1
            return None
        self._check(encoded)
        return encoded

    def left_out(self) -> str:
        """What was left out so far, for people; empty if nothing."""
        facts = []
        if self.short:
            facts.append(
                f"{self.short:,} texts left out as too short (--min-characters {self._s.min_characters}, --min-tokens "
                f"{self._s.min_tokens})"
            )
        if self.bad:
            facts.append(f"{self.bad:,} records left out, the first: {self.first_bad}")
        return "; ".join(facts)

    def _bad(self, where: str, problem: str) -> None:
        if not self._s.skip_bad_lines:
            raise bad_record(where, problem)
        self.bad += 1
        self.first_bad = self.first_bad or f"{where}: {problem}"


def pieces(encoded: Encoded, length: int) -> Iterator[Encoded]:
    """A text's tokens in pieces of `length` inputs, the last one shorter; each token is predicted once."""
    for start in range(0, len(encoded.ids) - 1, length):
        part = slice(start, start + length + 1)
        learn = encoded.learn[part].copy()
        learn[0] = False
        yield Encoded(encoded.ids[part].copy(), learn, encoded.where)


class TextStream:
    """A :class:`~openelm_mlx.finetune.data.types.Stream` over texts that need not fit into memory.

    Texts come window by window; those of a window are cut into pieces, which are put into rows (as in `Batches`, whole
    and apart from each other) and shuffled. A window ends after so many texts or tokens, or when every source has been
    read to its end in it. A position is where each source stood at the window's beginning, and the batch in the window.

    Args:
        sources: with the shares of tokens they shall have.
        settings: of the run.
        filter: makes tokens of texts.
        row_length: most inputs of a row.
        expected: tokens in all sources together, about.
        keep: tells texts that are not for training.
        window: most tokens of a window.
    """

    def __init__(
        self,
        sources: Sequence[TextSource],
        settings: Settings,
        filter: TextFilter,
        row_length: int,
        expected: int,
        keep: Callable[[str], bool] = lambda text: False,
        window: int = TOKENS,
    ) -> None:
        self._settings = settings
        self._filter = filter
        self._keep = keep
        self._row_length = row_length
        self._expected = expected
        self._most_tokens = window
        self._readers = [Reader(s, settings.text_key, settings.seed + n) for n, s in enumerate(sources)]
        self._weights = [s.weight for s in sources]
        self._drawn = [0] * len(sources)
        self._window = self._batch = 0
        self._begin = self._states()
        self._plan: Iterator[Batch] | None = None
        self._count = 0

    @property
    def position(self) -> dict[str, Any]:
        """Of the next batch; ``epoch`` is how often the source read least often was read to its end."""
        epoch = min(int(state["epoch"]) for state in self._begin)
        return {"epoch": epoch, "window": self._window, "batch": self._batch, "sources": self._begin}

    @property
    def most_rows(self) -> int:
        """Rows that no batch has more of."""
        return self._settings.batch_size

    @property
    def longest_row(self) -> int:
        """Length that no batch's rows exceed."""
        return self._row_length

    def batches_in(self, epochs: float) -> int:
        """How many batches make up about so many times the tokens of all sources."""
        return max(1, math.ceil(epochs * self._expected / (self._settings.batch_size * self._row_length)))

    def seek(self, position: dict[str, Any]) -> None:
        """Go on from a position that was told earlier.

        Raises:
            OpenELMError: it is none of this data's.
        """
        states = position.get("sources")
        if not isinstance(states, list) or len(states) != len(self._readers):
            raise OpenELMError("position: is one of other sources: data or settings have changed")
        for n, (reader, state) in enumerate(zip(self._readers, states, strict=True)):
            reader.seek(state)
            self._drawn[n] = whole_number("position: drawn", state.get("drawn"), 0)
        self._window = whole_number("position: window", position.get("window"), 0)
        self._begin, self._plan = self._states(), None
        batch = whole_number("position: batch", position.get("batch"), 0)
        self._batch, window = 0, self._window
        while self._batch < batch:
            next(self)
            if self._window != window:
                raise OpenELMError(f"position: there is no batch {batch} in window {window}: the data has changed")

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._plan is None:
            batches = self._fill()
            self._count = batches.batches_of(self._window)
            self._plan = batches.epoch(self._window)
        batch = next(self._plan)
        self._batch += 1
        if self._batch == self._count:
            self._window, self._batch, self._plan = self._window + 1, 0, None
            self._begin = self._states()
        return batch

    def _states(self) -> list[dict[str, int]]:
        return [{**reader.state, "drawn": n} for reader, n in zip(self._readers, self._drawn, strict=True)]

    def _fill(self) -> Batches:
        """The rows of the next window, not yet in order."""
        found: list[Encoded] = []
        first = [reader.place.epoch for reader in self._readers]
        texts = tokens = 0
        while texts < self._settings.shuffle_window and tokens < self._most_tokens:
            n = least_read(self._drawn, self._weights)
            encoded = self._next(n)
            if encoded is not None:
                texts, tokens = texts + 1, tokens + len(encoded.ids)
                self._drawn[n] += len(encoded.ids)
                found.extend(pieces(encoded, self._row_length))
            passes = min(r.place.epoch - e for r, e in zip(self._readers, first, strict=True))
            if passes > 0 and found:
                break
            if passes > 1:
                raise DataError("no text is left to train on: all are too short, or kept for validation")
        return Batches(
            found,
            batch_size=self._settings.batch_size,
            pack=True,
            row_length=self._row_length,
            shuffle_window=len(found),
            seed=self._settings.seed,
        )

    def _next(self, source: int) -> Encoded | None:
        record = next(self._readers[source])
        text = self._filter.text(record)
        if text is None or self._keep(text):
            return None
        return self._filter.encode(text, record.where)
