"""Examples to batches: rows of like lengths or packed ones, in an order that the seed and the epoch decide."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np

from openelm_mlx.errors import OpenELMError
from openelm_mlx.finetune.data.packing import best_fit
from openelm_mlx.finetune.data.types import Batch, Encoded, Ids, Item
from openelm_mlx.settings import whole_number

_MULTIPLE = 32
"""Rows end at a multiple of this: a compiled step is traced anew for each length."""

_Rows = list[list[int]]
"""Numbers of examples, row by row."""


class Batches:
    """A :class:`~openelm_mlx.finetune.data.types.Stream` over examples that are all in memory.

    An epoch has every example once, whole; its last batch is smaller if it must be. The order is a function of the seed
    and the epoch's number alone, so that a position is two numbers.

    Args:
        examples: at least one; all of a kind.
        batch_size: rows of a batch; of pairs, which take two rows each, the number of pairs.
        pack: fill rows of `row_length` with several examples each, instead of one example a row.
        row_length: most inputs of a row; an example of n ids has n - 1.
        shuffle_window: how many examples, taken at random, are sorted by length before they are cut into batches (or
            packed): 1 mixes lengths freely, more has less padding.
        seed: 0 or more.
        shuffle: False is the same order in every epoch, for validation: the longest rows come first, then such as make
            the first N batches a sample of all lengths.

    Raises:
        OpenELMError: there is no example, or one that is longer than a row.
    """

    def __init__(
        self,
        examples: Sequence[Item],
        *,
        batch_size: int,
        pack: bool,
        row_length: int,
        shuffle_window: int,
        seed: int,
        shuffle: bool = True,
    ) -> None:
        self._examples = examples
        self._sizes = [max(_inputs(row) for row in example.rows) for example in examples]
        self._batch_size = batch_size
        self._pack = pack
        self._row_length = row_length
        # A window that is no multiple would have small batches, or such as mix two windows' ends.
        self._window = math.ceil(shuffle_window / batch_size) * batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._counts: dict[int, int] = {}
        self._planned: tuple[int, list[_Rows]] | None = None
        self._epoch = self._batch = 0
        if not examples:
            raise OpenELMError("there are no examples to make batches of")
        longest = int(np.argmax(self._sizes))
        if self._sizes[longest] > row_length:
            raise OpenELMError(
                f"{examples[longest].where}: {self._sizes[longest]} inputs do not fit a row of {row_length}"
            )

    @property
    def position(self) -> dict[str, Any]:
        """Of the next batch: its ``epoch`` and, in that, the number of the ``batch``, both from 0."""
        return {"epoch": self._epoch, "batch": self._batch}

    @property
    def most_rows(self) -> int:
        """Rows that no batch has more of."""
        return min(self._batch_size, len(self._examples)) * len(self._examples[0].rows)

    @property
    def longest_row(self) -> int:
        """Length that no batch's rows exceed, padding included."""
        longest = min(self._row_length, sum(self._sizes)) if self._pack else max(self._sizes)
        return math.ceil(longest / _MULTIPLE) * _MULTIPLE

    def seek(self, position: dict[str, Any]) -> None:
        """Go on from a position that was told earlier.

        Raises:
            OpenELMError: it is none of these batches'.
        """
        epoch = whole_number("position: epoch", position.get("epoch"), 0)
        batch = whole_number("position: batch", position.get("batch"), 0)
        count = len(self._plan(epoch))
        if batch >= count:
            raise OpenELMError(
                f"position: epoch {epoch} has {count} batches, none is number {batch}: data or settings have changed"
            )
        self._epoch, self._batch = epoch, batch

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        plan = self._plan(self._epoch)
        batch = self._make(plan[self._batch])
        self._batch += 1
        if self._batch == len(plan):
            self._epoch, self._batch = self._epoch + 1, 0
        return batch

    def epoch(self, number: int) -> Iterator[Batch]:
        """The batches of one epoch; the position stays where it is."""
        return map(self._make, self._plan(number))

    def batches_in(self, epochs: float) -> int:
        """How many batches the first so many epochs have; the part of an epoch is rounded up.

        Packed, epochs differ: how many rows are needed depends on the order.
        """
        whole = int(epochs)
        count = sum(map(self.batches_of, range(whole)))
        if epochs == whole:
            return count
        part = (epochs - whole) * self.batches_of(whole)
        return count + max(1, math.ceil(part - 1e-6))  # 1.1 - 1 is a little above 0.1

    def batches_of(self, epoch: int) -> int:
        """How many batches an epoch has."""
        if not self._pack:
            return math.ceil(len(self._examples) / self._batch_size)
        if not self._shuffle:
            epoch = 0
        if epoch not in self._counts:
            self._plan(epoch)
        return self._counts[epoch]

    def _plan(self, epoch: int) -> list[_Rows]:
        """The batches of an epoch."""
        if not self._shuffle:
            epoch = 0
        if self._planned is None or self._planned[0] != epoch:
            plan = self._shuffled(epoch) if self._shuffle else self._in_order()
            self._planned, self._counts[epoch] = (epoch, plan), len(plan)
        return self._planned[1]

    def _shuffled(self, epoch: int) -> list[_Rows]:
        random = np.random.PCG64(np.random.SeedSequence((self._seed, epoch)))
        windows = self._cut(permutation(random, len(self._examples)), self._window)
        if self._pack:
            rows = best_fit(self._sizes, windows, self._row_length)
            return self._cut([rows[n] for n in permutation(random, len(rows))], self._batch_size)
        ordered = chain.from_iterable(sorted(window, key=self._sizes.__getitem__) for window in windows)
        batches = self._cut([[n] for n in ordered], self._batch_size)
        return [batches[n] for n in permutation(random, len(batches))]

    def _in_order(self) -> list[_Rows]:
        numbers = list(range(len(self._examples)))
        if self._pack:
            rows = best_fit(self._sizes, self._cut(numbers, self._window), self._row_length)
        else:
            rows = [[n] for n in numbers]
        rows.sort(key=lambda row: -self._length_of(row))
        batches = self._cut(rows, self._batch_size)
        return [batches[n] for n in _spread(len(batches))]

    @staticmethod
    def _cut(things: list[Any], size: int) -> list[list[Any]]:
        return [things[start : start + size] for start in range(0, len(things), size)]

    def _length_of(self, row: list[int]) -> int:
        return sum(self._sizes[n] for n in row)

    def _make(self, planned: _Rows) -> Batch:
        kept = [[self._examples[n].rows for n in row] for row in planned]
        return batch_of([row for rows in kept for row in zip(*rows, strict=True)])


def batch_of(rows: Sequence[Sequence[Encoded]]) -> Batch:
    """The batch with these examples in its rows."""
    documents = tuple(tuple(map(_inputs, row)) for row in rows)
    shape = (len(rows), math.ceil(max(map(sum, documents)) / _MULTIPLE) * _MULTIPLE)
    ids, following = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    learn = np.zeros(shape, np.bool_)
    for r, row in enumerate(rows):
        end = 0
        for example in row:
            start, end = end, end + _inputs(example)
            ids[r, start:end] = example.ids[:-1]
            following[r, start:end] = example.ids[1:]
            learn[r, start:end] = example.learn[1:]
    places: Ids = np.flatnonzero(learn).astype(np.int32)
    return Batch(
        ids=ids,
        documents=documents,
        places=places,
        targets=following.reshape(-1)[places],
        where=tuple(example.where for row in rows for example in row),
    )


def _inputs(example: Encoded) -> int:
    return len(example.ids) - 1


def permutation(random: np.random.PCG64, count: int) -> list[int]:
    """The numbers below `count` in a random order that is the same with every version of NumPy."""
    # NumPy promises to keep the bit generator's own numbers, but not what Generator.permutation makes of them.
    order: list[int] = np.argsort(random.random_raw(count), kind="stable").tolist()
    return order


def _spread(count: int) -> list[int]:
    """0 to count - 1 such that the first of them lie evenly between the ends: by the bits read backwards."""
    bits = (count - 1).bit_length()
    return sorted(range(count), key=lambda n: int(f"{n:0{bits}b}"[::-1], 2))
