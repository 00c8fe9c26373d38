"""The batches of a run, from whatever its data is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path

from openelm_mlx.finetune.base import Base
from openelm_mlx.finetune.data.batches import Batches
from openelm_mlx.finetune.data.corpus import find_corpus
from openelm_mlx.finetune.data.dataset import Dataset, Progress, open_data
from openelm_mlx.finetune.data.encoding import Encoder
from openelm_mlx.finetune.data.splits import find_splits
from openelm_mlx.finetune.data.streaming import TextFilter
from openelm_mlx.finetune.data.survey import open_stream
from openelm_mlx.finetune.data.types import Batch, Item, Stream
from openelm_mlx.finetune.settings import Settings, SettingsError


@dataclass(frozen=True)
class Feed:
    """What a run is given to read."""

    train: Stream
    valid: list[Batch]
    """The same each time; none to do without."""
    test: list[Batch]

    def once(self) -> tuple[Iterator[Batch], int]:
        """Batches with everything that is in memory once, those to evaluate too; and how many these are."""
        assert isinstance(self.train, Batches)
        count = len(self.valid) + len(self.test) + self.train.batches_of(0)
        return chain(self.valid, self.test, self.train.epoch(0)), count


def data_files(settings: Settings) -> tuple[Path, ...]:
    """The local files that the run's data comes from.

    Raises:
        DataError: no data is named, or it is not there.
    """
    if settings.streams:
        return find_corpus(settings.data, settings.valid, settings.test).files
    return tuple(find_splits(settings).files)


def read_data(settings: Settings, base: Base, say: Callable[[str], None], reading: Progress | None) -> Feed:
    """All of a run's data, or for texts that are streamed, what there is to know before.

    Raises:
        OpenELMError: the data cannot be read, or the tokenizer is another model's.
    """
    length = min(settings.max_length, base.config.max_context_length)
    return (_streamed if settings.streams else _in_memory)(settings, base, length, say, reading)


def _in_memory(s: Settings, base: Base, length: int, say: Callable[[str], None], reading: Progress | None) -> Feed:
    data = open_data(s, base.tokenizer, length, say, reading)
    for dataset in (data.train, data.valid, data.test):
        for example in dataset.examples if dataset else ():
            _check_ids(base, example)

    def batches(dataset: Dataset, *, shuffle: bool) -> Batches:
        pack = dataset.plain if s.packing == "auto" else s.packing == "on"
        return _batches(s, dataset.examples, length, pack=pack, shuffle=shuffle)

    valid, test = (batches(d, shuffle=False) if d else None for d in (data.valid, data.test))
    return Feed(batches(data.train, shuffle=True), _first(valid, s.eval_batches), _first(test))


def _streamed(s: Settings, base: Base, length: int, say: Callable[[str], None], reading: Progress | None) -> Feed:
    corpus = find_corpus(s.data, s.valid, s.test)
    filter = TextFilter(s, Encoder(base.tokenizer), partial(_check_ids, base))
    stream, valid, test = open_stream(s, corpus, filter, length, say, reading)
    valid_batches, test_batches = (
        _batches(s, pieces, length, pack=True, shuffle=False) if pieces else None for pieces in (valid, test)
    )
    return Feed(stream, _first(valid_batches, s.eval_batches), _first(test_batches))


def _check_ids(base: Base, example: Item) -> None:
    """Refuse the tokenizer of another model: an id that no embedding belongs to would be read from anywhere."""
    highest = int(example.ids.max())
    if highest >= base.config.vocab_size:
        raise SettingsError(
            f"{base.folder}: its tokenizer is not the model's: {example.where} has the token {highest}, and "
            f"the model has {base.config.vocab_size}; convert the model again with its own --tokenizer"
        )


def _batches(s: Settings, examples: Sequence[Item], length: int, *, pack: bool, shuffle: bool) -> Batches:
    return Batches(
        examples,
        batch_size=s.batch_size,
        pack=pack,
        row_length=length,
        shuffle_window=s.shuffle_window,
        seed=s.seed,
        shuffle=shuffle,
    )


def _first(batches: Batches | None, most: int = 0) -> list[Batch]:
    """The first `most` batches of those to evaluate; all if that is 0."""
    return list(islice(batches.epoch(0), most or None)) if batches else []
