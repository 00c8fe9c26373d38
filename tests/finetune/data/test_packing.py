"""Packing: every thing once and whole, and rows as full as best-fit-decreasing makes them."""

from __future__ import annotations

import random
import time
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openelm_mlx.finetune.data.packing import best_fit

ROOM = 16
SIZES = st.lists(st.integers(1, ROOM), min_size=1, max_size=40)


def simple_loads(sizes: list[int], windows: list[list[int]], room: int) -> list[int]:
    """The definition, without a thought for time: how full each row is."""
    loads: list[int] = []
    for window in windows:
        for size in sorted((sizes[n] for n in window), reverse=True):
            fitting = [n for n, load in enumerate(loads) if load + size <= room]
            if fitting:
                loads[max(fitting, key=lambda n: loads[n])] += size
            else:
                loads.append(size)
    return sorted(loads)


@given(SIZES, st.integers(1, 40))
def test_equals_the_definition(sizes: list[int], window: int) -> None:
    numbers = list(range(len(sizes)))
    windows = [numbers[start : start + window] for start in range(0, len(sizes), window)]
    rows = best_fit(sizes, windows, ROOM)
    assert sorted(chain.from_iterable(rows)) == numbers
    loads = sorted(sum(sizes[n] for n in row) for row in rows)
    assert max(loads) <= ROOM
    assert loads == simple_loads(sizes, windows, ROOM)


def test_long_things_are_completed_by_short_ones() -> None:
    assert best_fit([6, 10, 4, 9, 7], [[0, 1, 2, 3, 4]], 16) == [[1, 0], [3, 4], [2]]


def test_rows_stay_open_for_the_next_window() -> None:
    assert best_fit([10, 10, 6, 6], [[0, 1], [2, 3]], 16) == [[0, 3], [1, 2]]


def test_what_fits_no_row_is_refused() -> None:
    with pytest.raises(ValueError, match="17 does not fit a row of 16"):
        best_fit([3, 17], [[0, 1]], 16)


def test_a_large_data_set_takes_no_time() -> None:
    chance = random.Random(0)
    sizes = [chance.randint(20, 600) for _ in range(100_000)]
    start = time.perf_counter()
    rows = best_fit(sizes, [range(len(sizes))], 2048)
    assert time.perf_counter() - start < 5  # 0.2 s; comparing each with each row takes minutes
    assert len(rows) <= 1.001 * sum(sizes) / 2048 + 1
