"""Layer-wise scaling against NumPy and against the sizes that Apple's own GPTConfig gave."""

from __future__ import annotations

import json
from math import ceil, floor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openelm_mlx.scaling import make_divisible, query_heads, spread
from tests.golden.checkpoints import BUNDLED, weights_module
from tests.support.models import golden_config

GOLDEN = json.loads((BUNDLED / "layer_wise_scaling.json").read_text())
MULTIPLIERS = st.one_of(
    st.floats(0.01, 1000, allow_nan=False),
    st.decimals(0, 10, places=2).map(float),
    st.decimals(0, 10, places=3).map(float),  # halves of a hundredth: where rounding rules differ
    st.integers(1, 8),
)


@settings(max_examples=500)
@given(MULTIPLIERS, MULTIPLIERS, st.integers(1, 100))
def test_spread_is_numpys_linspace_rounded(first: float, last: float, layers: int) -> None:
    expected = [round(v, 2) for v in np.linspace(first, last, num=layers, dtype=float)]
    assert list(spread(first, last, layers)) == expected


def test_spread_of_a_falling_and_of_a_flat_range() -> None:
    assert spread(4.0, 0.5, 3) == (4.0, 2.25, 0.5)
    assert spread(1.0, 1.0, 4) == (1.0,) * 4
    assert spread(0.5, 4.0, 1) == (0.5,)
    # Decimal rounding would say 2.68: the float64 just below 2.675 is rounded by NumPy after scaling, to 2.68 or 2.67.
    assert spread(2.675, 2.675, 2) == (round(np.float64(2.675), 2),) * 2


@given(st.floats(0.01, 1e6, allow_nan=False), st.integers(1, 4096))
def test_make_divisible_is_what_it_says(value: float, divisor: int) -> None:
    below, above = floor(value / divisor) * divisor, ceil(value / divisor) * divisor
    nearest = above if value - below >= divisor / 2 else below
    expected = max(nearest, divisor)
    if expected < 0.9 * value:
        expected = above
    assert make_divisible(value, divisor) == expected


@pytest.mark.parametrize(
    ("value", "divisor", "expected"),
    [
        (0.1, 8, 8),  # never zero
        (11.9, 8, 8 + 8),  # 8 is less than 90% of 11.9
        (12, 8, 16),  # halves go up
        (107, 96, 192),  # 96 is the nearest, and 90% of 107 is 96.3
        (106, 96, 96),
        (1280 * 4.0, 256, 5120),
    ],
)
def test_make_divisible_by_hand(value: float, divisor: int, expected: int) -> None:
    assert make_divisible(value, divisor) == expected
    assert isinstance(make_divisible(value, divisor), int)


def test_query_heads_come_in_whole_groups() -> None:
    assert query_heads((0.5, 0.7, 1.0), model_dim=1280, head_dim=64, groups=4) == (12, 16, 20)


@pytest.mark.parametrize("case", GOLDEN)
def test_sizes_of_every_golden_case(case: str) -> None:
    config, sizes = golden_config(case), GOLDEN[case]
    assert list(config.num_query_heads) == sizes["num_query_heads"]
    assert list(config.num_kv_heads) == sizes["num_kv_heads"]
    assert list(config.ffn_multipliers) == sizes["ffn_multipliers"]  # type: ignore[arg-type]
    assert list(config.ffn_dims) == sizes["ffn_dims"]


def test_all_eight_cases_are_there() -> None:
    assert len(GOLDEN) == 8
    assert GOLDEN.keys() == weights_module(BUNDLED).CASES.keys()
