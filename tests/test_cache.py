"""The key-value cache: what goes in comes out, across every growth and every trim."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openelm_mlx.cache import KVCache, causal_mask, make_cache
from tests.support.models import golden_model

Array = npt.NDArray[Any]


def positions(start: int, count: int, *, head_dim: int = 2, sign: int = 1) -> mx.array:
    """``(1, 3, count, head_dim)`` values that name their head, position and dimension."""
    head, position, dim = np.meshgrid(range(3), range(start, start + count), range(head_dim), indexing="ij")
    return mx.array(sign * (head * 1e6 + position * 10 + dim).astype(np.float32)[None])


def brute_mask(offset: int, length: int, window: int | None = None) -> Array:
    mask = np.zeros((length, offset + length), bool)
    for row in range(length):
        for column in range(offset + length):
            behind = offset + row - column
            mask[row, column] = behind >= 0 and (window is None or behind < window)
    return mask


@settings(max_examples=60)
@given(
    st.lists(st.one_of(st.integers(1, 5), st.integers(100, 300), st.integers(-300, -1)), min_size=1, max_size=8),
    st.sampled_from([mx.float32, mx.bfloat16]),
)
def test_contents_survive_growth_and_trimming(steps: list[int], dtype: mx.Dtype) -> None:
    cache = KVCache()
    filled: npt.NDArray[np.float32] = np.zeros((1, 3, 0, 2), np.float32)
    for turn, n in enumerate(steps):
        if n < 0:  # forget
            assert cache.trim(-n) == min(-n, filled.shape[2])
            filled = filled[:, :, : max(filled.shape[2] + n, 0)]
            continue
        new = (positions(turn * 1000, n) % 251).astype(dtype)  # small enough for bfloat16 to hold exactly
        keys, values = cache.update_and_fetch(new, -new)
        filled = np.concatenate([filled, np.asarray(new.astype(mx.float32))], axis=2)
        assert keys.dtype == values.dtype == dtype
        np.testing.assert_array_equal(np.asarray(keys.astype(mx.float32)), filled)
        np.testing.assert_array_equal(np.asarray(values.astype(mx.float32)), -filled)
    assert cache.offset == filled.shape[2]


@pytest.mark.parametrize("length", [255, 256, 257, 512, 513])
def test_capacity_is_whole_steps(length: int) -> None:
    cache = KVCache()
    keys, _ = cache.update_and_fetch(positions(0, length), positions(0, length))
    assert keys.shape == (1, 3, length, 2)
    assert cache.keys is not None
    assert cache.keys.shape[2] == (length + 255) // 256 * 256


def test_one_token_at_a_time_across_the_boundary() -> None:
    cache = KVCache()
    for n in range(258):
        keys, values = cache.update_and_fetch(positions(n, 1), positions(n, 1, sign=-1))
        mx.eval(keys, values)
    assert mx.array_equal(keys, positions(0, 258))
    assert mx.array_equal(values, positions(0, 258, sign=-1))


def test_what_was_fetched_before_does_not_change() -> None:
    cache = KVCache()
    before, _ = cache.update_and_fetch(positions(0, 3), positions(0, 3))
    cache.trim(2)
    cache.update_and_fetch(positions(70, 2), positions(70, 2))
    assert mx.array_equal(before, positions(0, 3))


def test_values_may_be_wider_than_keys() -> None:
    cache = KVCache()
    keys, values = cache.update_and_fetch(positions(0, 300, head_dim=2), positions(0, 300, head_dim=4))
    assert (keys.shape[-1], values.shape[-1]) == (2, 4)


def test_bytes_held() -> None:
    cache = KVCache()
    assert cache.nbytes == 0
    cache.update_and_fetch(positions(0, 3), positions(0, 3))
    assert cache.nbytes == 2 * (3 * 256 * 2) * 4  # keys and values, unfilled positions included
    cache.update_and_fetch(positions(3, 254), positions(3, 254))
    assert cache.nbytes == 2 * (3 * 512 * 2) * 4


def test_state_says_what_to_evaluate_and_how_much_is_filled() -> None:
    cache = KVCache()
    assert cache.state == (None, None, 0)
    mx.eval([cache.state])
    cache.update_and_fetch(positions(0, 5), positions(0, 5, sign=-1))
    keys, values, filled = cache.state
    assert keys is not None
    assert values is not None
    assert filled == 5
    assert mx.array_equal(keys[:, :, :5], positions(0, 5))
    assert mx.array_equal(values[:, :, :5], positions(0, 5, sign=-1))


@pytest.mark.parametrize("offset", [0, 1, 7, 300])
@pytest.mark.parametrize("length", [1, 2, 9])
@pytest.mark.parametrize("window", [None, 1, 4, 1000])
def test_masks(offset: int, length: int, window: int | None) -> None:
    cache = KVCache()
    if offset:
        cache.update_and_fetch(positions(0, offset), positions(0, offset))
    mask = cache.make_mask(length, return_array=True, window_size=window)
    np.testing.assert_array_equal(np.asarray(mask), brute_mask(offset, length, window))


def test_the_usual_mask_is_left_to_the_kernel() -> None:
    assert causal_mask(1) is None
    assert causal_mask(2) == "causal"
    cache = KVCache()
    assert (cache.make_mask(1), cache.make_mask(5)) == (None, "causal")


def test_trimming_more_than_there_is() -> None:
    cache = KVCache()
    assert cache.trim(3) == 0
    cache.update_and_fetch(positions(0, 2), positions(0, 2))
    assert cache.is_trimmable()
    assert cache.trim(5) == 2
    assert cache.offset == 0


def test_one_cache_a_layer() -> None:
    model = golden_model("tiny-untied")
    caches = make_cache(model)
    assert len(caches) == 3
    assert len({id(c) for c in caches}) == 3
    model(mx.array([[1, 2, 3]]), cache=caches)
    heads = [c.keys.shape[1] for c in caches if c.keys is not None]
    assert heads == list(model.config.num_kv_heads)
