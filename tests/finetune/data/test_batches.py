"""Batches: every target once in an epoch, nothing else ever, in an order that a position brings back."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openelm_mlx.errors import OpenELMError
from openelm_mlx.finetune.data.batches import Batches
from openelm_mlx.finetune.data.types import Batch, Encoded

ROW = 70
STRIDE = 1000
"""Token j of example i is 1 + i * STRIDE + j, so that every token says where it is from; 0 is in none."""


def example(number: int, length: int, learned: Iterable[int] | None = None) -> Encoded:
    ids = np.arange(length, dtype=np.int32) + 1 + number * STRIDE
    learn = np.zeros(length, np.bool_)
    learn[[*(range(1, length) if learned is None else learned)]] = True
    return Encoded(ids, learn, f"my.jsonl:{number + 1}")


@dataclass(frozen=True)
class Case:
    """Examples, and how batches are made of them."""

    examples: list[Encoded]
    options: dict[str, Any]

    def batches(self, **other: Any) -> Batches:
        return Batches(self.examples, **{**self.options, **other})


@st.composite
def cases(draw: st.DrawFn) -> Case:
    lengths = draw(st.lists(st.integers(2, ROW + 1), min_size=1, max_size=30))
    examples = [
        example(n, length, draw(st.sets(st.integers(1, length - 1), min_size=1, max_size=5)))
        for n, length in enumerate(lengths)
    ]
    options = {
        "batch_size": draw(st.integers(1, 5)),
        "pack": draw(st.booleans()),
        "row_length": ROW,
        "shuffle_window": draw(st.integers(1, 40)),
        "seed": draw(st.integers(0, 2**64 - 1)),
        "shuffle": draw(st.booleans()),
    }
    return Case(examples, options)


def content(batches: Iterable[Batch]) -> list[Any]:
    """What can be compared."""
    return [
        (b.ids.tolist(), b.documents, b.places.tolist(), b.targets.tolist(), b.where, b.ids.dtype, b.targets.dtype)
        for b in batches
    ]


def order(batches: Iterable[Batch]) -> list[tuple[str, ...]]:
    return [batch.where for batch in batches]


@given(cases(), st.integers(0, 3))
def test_an_epoch_has_every_target_once_and_nothing_else(case: Case, number: int) -> None:
    seen: Counter[int] = Counter()
    for batch in case.batches().epoch(number):
        inputs = batch.ids.reshape(-1)
        assert (np.diff(batch.places) > 0).all()
        for place, target in zip(batch.places.tolist(), batch.targets.tolist(), strict=True):
            assert inputs[place] == target - 1, "a target is predicted from the token before it"
            seen[target] += 1
    learned = [ids for e in case.examples for ids in e.ids[e.learn].tolist()]
    assert seen == Counter(learned)


@given(cases())
def test_rows_hold_whole_examples_one_after_another(case: Case) -> None:
    by_name = {e.where: e for e in case.examples}
    names: list[str] = []
    for batch in case.batches().epoch(0):
        B, L = batch.ids.shape
        assert 1 <= B == len(batch.documents) <= case.options["batch_size"]
        where = iter(batch.where)
        for row, sizes in zip(batch.ids, batch.documents, strict=True):
            expected: list[int] = []
            for size in sizes:
                e = by_name[next(where)]
                assert size == len(e.ids) - 1
                expected += e.ids[:-1].tolist()
            assert len(expected) <= ROW
            assert row.tolist() == expected + [0] * (L - len(expected))
        fullest = max(sum(sizes) for sizes in batch.documents)
        assert L % 32 == 0
        assert fullest <= L < fullest + 32
        assert not list(where)
        assert batch.tokens == np.count_nonzero(batch.ids)
        assert case.options["pack"] or not batch.packed
        names += batch.where
    assert sorted(names) == sorted(by_name)


@given(cases())
def test_only_the_last_batch_is_smaller(case: Case) -> None:
    rows = [len(batch.documents) for batch in case.batches().epoch(0)]
    assert sum(size < case.options["batch_size"] for size in rows) <= 1


@given(cases(), st.integers(0, 40), st.integers(1, 10))
def test_going_on_from_a_position_equals_never_stopping(case: Case, before: int, after: int) -> None:
    whole = case.batches()
    for _ in range(before):
        next(whole)
    position = dict(whole.position)
    resumed = case.batches()
    resumed.seek(position)
    assert resumed.position == position
    assert content(islice(resumed, after)) == content(islice(whole, after))
    assert resumed.position == whole.position


@given(cases(), st.integers(1, 3))
def test_the_stream_is_epoch_after_epoch(case: Case, epochs: int) -> None:
    stream = case.batches()
    expected = [batch for number in range(epochs) for batch in case.batches().epoch(number)]
    assert case.batches().batches_in(epochs) == len(expected)
    assert content(islice(stream, len(expected))) == content(expected)
    assert stream.position == {"epoch": epochs, "batch": 0}


@given(cases(), st.floats(0.01, 3))
def test_a_part_of_an_epoch_is_rounded_up(case: Case, epochs: float) -> None:
    whole, batches = int(epochs), case.batches()
    least = batches.batches_in(whole) + (epochs - whole) * len(list(batches.epoch(whole)))
    assert least - 1e-5 <= batches.batches_in(epochs) < least + 1


def test_a_part_of_an_epoch_by_hand() -> None:
    batches = make(40, 4)
    assert [batches.batches_in(e) for e in (0.001, 0.1, 0.11, 1, 1.1, 2.5)] == [1, 1, 2, 10, 11, 25]


def make(count: int, batch_size: int, **options: Any) -> Batches:
    examples = [example(n, 2 + n % 60) for n in range(count)]
    given_ = {"pack": False, "row_length": ROW, "shuffle_window": 16, "seed": 0, **options}
    return Batches(examples, batch_size=batch_size, **given_)


@pytest.mark.parametrize("pack", [False, True])
def test_the_order_depends_on_seed_and_epoch_alone(pack: bool) -> None:
    first = order(make(64, 4, pack=pack).epoch(0))
    late = make(64, 4, pack=pack)
    for _ in range(30):
        next(late)
    assert order(late.epoch(0)) == first
    assert order(make(64, 4, pack=pack).epoch(1)) != first
    assert order(make(64, 4, pack=pack, seed=1).epoch(0)) != first
    # Seed and epoch are no sum: neither (0, 1) and (1, 0) nor shifted seeds share an order.
    assert order(make(64, 4, pack=pack, seed=1).epoch(0)) != order(make(64, 4, pack=pack).epoch(1))


def test_the_order_outlives_releases() -> None:
    # A run that was stopped with an older release goes on with this one.
    examples = [example(n, 5) for n in range(8)]
    batches = Batches(examples, batch_size=1, pack=False, row_length=ROW, shuffle_window=1, seed=7)
    assert [int(w.split(":")[1]) for (w,) in order(batches.epoch(3))] == [2, 4, 6, 8, 7, 1, 3, 5]


def test_a_window_is_sorted_by_length() -> None:
    sizes = sorted(e for e in (2 + n % 60 - 1 for n in range(120)))
    batches = [[sum(row) for row in b.documents] for b in make(120, 8, shuffle_window=1000).epoch(0)]
    assert [size for batch in sorted(batches) for size in batch] == sizes
    assert batches != sorted(batches)


def test_a_window_of_one_mixes_lengths() -> None:
    spans = [
        max(sizes) - min(sizes)
        for sizes in ([sum(row) for row in b.documents] for b in make(120, 8, shuffle_window=1).epoch(0))
    ]
    assert min(spans) > 15


@pytest.mark.parametrize("window", [3, 10, 16])
def test_windows_that_are_no_multiple_of_the_batch_make_no_small_batches(window: int) -> None:
    assert [len(b.documents) for b in make(64, 8, shuffle_window=window).epoch(0)] == [8] * 8


def test_packing_wastes_little() -> None:
    lengths = np.random.default_rng(0).integers(10, 400, 3000)
    examples = [example(n, int(length)) for n, length in enumerate(lengths)]
    batches = Batches(examples, batch_size=4, pack=True, row_length=1024, shuffle_window=1024, seed=0)
    used = [(batch.tokens, batch.ids.size) for batch in batches.epoch(0)]
    assert sum(tokens for tokens, _ in used) > 0.99 * sum(places for _, places in used)


def test_packing_mixes_the_same_examples_differently_in_each_epoch() -> None:
    def together(epoch: int) -> set[tuple[str, ...]]:
        batches = make(200, 1, pack=True, shuffle_window=50)
        return {tuple(sorted(batch.where)) for batch in batches.epoch(epoch)}

    assert len(together(0) & together(1)) < 0.2 * len(together(0))


# Validation.


@pytest.mark.parametrize("pack", [False, True])
def test_without_shuffling_each_epoch_is_the_same_whatever_the_seed(pack: bool) -> None:
    first = content(make(50, 4, pack=pack, shuffle=False).epoch(0))
    assert content(make(50, 4, pack=pack, shuffle=False, seed=5).epoch(3)) == first


def test_without_shuffling_examples_of_like_lengths_are_together() -> None:
    batches = make(60, 4, shuffle=False)
    assert {max(max(row) for row in b.documents) - min(min(row) for row in b.documents) for b in batches.epoch(0)} == {
        3
    }


def test_without_shuffling_the_longest_rows_are_first_and_the_beginning_is_a_sample() -> None:
    lengths = [sum(row[0] for row in b.documents) / 4 for b in make(240, 4, shuffle=False, row_length=60).epoch(0)]
    assert lengths[0] == max(lengths)
    assert len(lengths) == 60
    for beginning in (8, 15, 30):
        assert math.isclose(np.mean(lengths[:beginning]), np.mean(lengths), rel_tol=0.2)


# What is refused.


def test_no_examples_are_refused() -> None:
    with pytest.raises(OpenELMError, match="no examples"):
        make(0, 4)


@pytest.mark.parametrize("pack", [False, True])
def test_an_example_longer_than_a_row_is_refused(pack: bool) -> None:
    examples = [example(0, 5), example(1, 12)]
    with pytest.raises(OpenELMError, match=r"my\.jsonl:2: 11 inputs do not fit a row of 10"):
        Batches(examples, batch_size=1, pack=pack, row_length=10, shuffle_window=4, seed=0)


@pytest.mark.parametrize(
    ("position", "message"),
    [
        ({}, "position: epoch must be a whole number, 0 or more, not None"),
        ({"epoch": 0, "batch": -1}, "position: batch must be a whole number, 0 or more, not -1"),
        ({"epoch": True, "batch": 0}, "position: epoch must be a whole number, 0 or more, not True"),
        ({"epoch": 2, "batch": 10}, "position: epoch 2 has 10 batches, none is number 10"),
    ],
)
def test_a_position_of_other_data_is_refused(position: dict[str, Any], message: str) -> None:
    batches = make(40, 4)
    next(batches)
    with pytest.raises(OpenELMError, match=message):
        batches.seek(position)
    assert batches.position == {"epoch": 0, "batch": 1}
