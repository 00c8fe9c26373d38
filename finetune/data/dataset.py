"""A run's data: read, encoded and counted, with a part of it kept for validation where no file is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from openelm_mlx.errors import OpenELMError, TokenizerError
from openelm_mlx.finetune.data.encoding import Encoder, Form
from openelm_mlx.finetune.data.formats import BadRecord, Text
from openelm_mlx.finetune.data.pairs import PairEncoder
from openelm_mlx.finetune.data.records import DataError, Record, bad_record
from openelm_mlx.finetune.data.report import Report
from openelm_mlx.finetune.data.splits import Source, find_splits
from openelm_mlx.finetune.data.splitting import content, keep_for_validation
from openelm_mlx.finetune.data.types import Item
from openelm_mlx.finetune.settings import Settings
from openelm_mlx.tokenizer import Tokenizer

Say = Callable[[str], None]
Progress = Callable[[int, int], None]
"""Told now and then how much is read and how much there is: bytes, or rows of a Hub data set."""

_BETWEEN_PROGRESS = 256


@dataclass(frozen=True)
class Dataset:
    """The examples of one split."""

    examples: list[Item]
    report: Report
    plain: bool
    """Whether all of them are plain text."""


@dataclass(frozen=True)
class Data:
    """The examples of a run."""

    train: Dataset
    valid: Dataset | None
    test: Dataset | None


def open_data(
    settings: Settings, tokenizer: Tokenizer, max_length: int, say: Say, progress: Progress | None = None
) -> Data:
    """Read all of a run's data; what was counted is said, one fact a line.

    Args:
        settings: name the data and say how it is taken.
        tokenizer: the model's.
        max_length: most tokens of an example.
        say: told the facts.
        progress: told how far the reading of a file is.

    Raises:
        DataError: data is missing, cannot be read, or there is nothing in it to train on.
        OpenELMError: the tokenizer has no end-of-text token, or no chat template for a chat.
    """
    splits = find_splits(settings)
    form = _form(settings, tokenizer)

    def load(split: str, source: Source | None) -> Dataset | None:
        if source is None:
            return None
        return load_examples(source, split, form, max_length, skip_bad=settings.skip_bad_lines, progress=progress)

    train, valid, test = (load(name, source) for name, source in splits.items())
    assert train is not None
    if valid is None and settings.valid_fraction:
        train, valid = _split(train, settings)
    for dataset in (train, valid, test):
        for line in dataset.report.lines() if dataset else ():
            say(line)
    if valid is None and settings.valid_fraction:
        say("valid: too few different examples to keep some of them; --valid names a file to validate on")
    for name, dataset in (("valid", valid), ("test", test)):
        if dataset and (known := _shared(train.examples, dataset.examples)):
            say(f"{name}: {known:,} of these are in the training data too")
    return Data(train, valid, test)


def _form(s: Settings, tokenizer: Tokenizer) -> Form:
    if s.objective == "dpo":
        return PairEncoder(tokenizer, raw=s.raw, max_prompt=s.max_prompt)
    return Encoder(tokenizer, raw=s.raw, train_on_prompt=s.train_on_prompt)


def load_examples(
    source: Source,
    split: str,
    form: Form,
    max_length: int,
    *,
    skip_bad: bool = False,
    progress: Progress | None = None,
) -> Dataset:
    """The examples of a source, each of 2 to `max_length` tokens of which some are learned.

    Args:
        source: the records.
        split: what they are for, as the report names it.
        form: what they are, which makes tokens of them.
        max_length: most tokens of an example; what goes beyond is cut off its end.
        skip_bad: count records that are no examples instead of ending there.
        progress: told how far reading is.

    Raises:
        DataError: a record is bad, the source cannot be read on, or no example is left.
    """
    reading = _Reading(split, source.name, form, max_length, skip_bad)
    with closing(source):
        for number, record in enumerate(source):
            if progress and number % _BETWEEN_PROGRESS == 0:
                progress(source.done, source.total)
            reading.add(record)
    if progress:
        progress(source.total, source.total)
    if not reading.examples:
        raise DataError(reading.report.nothing_left())
    return Dataset(reading.examples, reading.report, reading.plain)


class _Reading:
    """The examples so far."""

    def __init__(self, split: str, source: str, form: Form, max_length: int, skip_bad: bool) -> None:
        self.examples: list[Item] = []
        self.report = Report(split, source, max_length, unit=form.unit, eos=form.eos)
        self.plain = True
        self._form = form
        self._skip_bad = skip_bad
        self._seen: set[bytes] = set()

    def add(self, record: Record) -> None:
        try:
            if record.problem:
                raise BadRecord(record.problem)
            example = self._form.read(record.values)
            encoded = self._form.encode(example, record.where)
        except (BadRecord, TokenizerError) as e:
            if not self._skip_bad:
                raise bad_record(record.where, e) from None
            self.report.count_bad(f"{record.where}: {e}")
            return
        except OpenELMError as e:
            raise DataError(f"{record.where}: {e}") from None
        kept = self.report.count(encoded, None if encoded is None else self._form.cut(encoded, self.report.max_length))
        if kept is not None:
            self._keep(example, kept)

    def _keep(self, example: Any, encoded: Item) -> None:
        self.examples.append(encoded)
        self.plain = self.plain and isinstance(example, Text)
        self.report.spelled += any(self.report.eos in text for text in example.texts)
        key = content(encoded)
        self.report.duplicates += key in self._seen
        self._seen.add(key)


def _split(train: Dataset, settings: Settings) -> tuple[Dataset, Dataset | None]:
    rest, kept = keep_for_validation(train.examples, settings.valid_fraction, settings.seed)
    if not kept:
        return train, None
    return (
        Dataset(rest, train.report.of_rest(rest), train.plain),
        Dataset(kept, train.report.of_kept(kept), train.plain),
    )


def _shared(train: Iterable[Item], others: Iterable[Item]) -> int:
    known = {content(example) for example in train}
    return sum(content(example) in known for example in others)
