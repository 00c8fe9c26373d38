"""Random parts of texts, with as many bytes as are wanted."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from openelm_mlx.finetune.data.sample import Sample


def sample(texts: Sequence[str], largest: int, seed: int = 0) -> Sample:
    made = Sample(largest, seed)
    for text in texts:
        made.add(text)
    return made


def test_all_that_fit_are_kept_in_order() -> None:
    texts = ["b", "é", "a", "", "b"]
    made = sample(texts, 5)
    assert made.texts == texts
    assert (made.nbytes, made.added) == (5, 5)


@pytest.mark.parametrize("seed", range(5))
def test_those_with_the_smallest_draws_are_kept(seed: int) -> None:
    texts = [str(n) * (1 + n * 7 % 23) for n in range(10, 90)]
    made = sample(texts, 300, seed)
    rng = random.Random(seed)
    drawn = sorted((rng.random(), n) for n in range(len(texts)))
    expected: list[int] = []
    for _, n in drawn:
        if sum(len(texts[k]) for k in (*expected, n)) > 300:
            break
        expected.append(n)
    assert made.texts == [texts[n] for n in sorted(expected)]
    assert made.nbytes == sum(map(len, made.texts)) <= 300
    assert made.added == sum(map(len, texts))


def test_every_place_is_as_likely() -> None:
    texts = [f"{n:02}" for n in range(20)]
    kept = Counter(text for seed in range(400) for text in sample(texts, 20, seed).texts)
    assert sum(kept.values()) == 400 * 10
    assert all(160 < kept[text] < 240 for text in texts)  # 200 expected, and 10 is its standard deviation


def test_the_seed_decides() -> None:
    texts = [str(n) for n in range(100, 200)]
    assert sample(texts, 60, 1).texts == sample(texts, 60, 1).texts != sample(texts, 60, 2).texts
