"""Layer-wise scaling: from two multipliers to the sizes of every layer.

Section 2.1 of the OpenELM paper (alpha scales the attention heads, beta the feed-forward width), with the rounding of
CoreNet's ``GPTConfig`` (corenet/modeling/models/language_modeling/general_gpt.py), which decides the shapes of the
released weights. Plain floats reproduce NumPy's float64 arithmetic here; tests compare the two.
"""

from __future__ import annotations


def make_divisible(value: float, divisor: int) -> int:
    """The multiple of `divisor` nearest to `value`, at least one `divisor`, and never below 90% of `value`."""
    rounded = max(divisor, int(value + divisor / 2) // divisor * divisor)
    if rounded < 0.9 * value:
        rounded += divisor
    return int(rounded)


def spread(first: float, last: float, layers: int) -> tuple[float, ...]:
    """`layers` multipliers from `first` to `last`, as ``[round(v, 2) for v in numpy.linspace(...)]`` gives them."""
    if layers == 1:
        return (_round2(first),)
    step = (last - first) / (layers - 1)
    values = [i * step + first for i in range(layers - 1)]
    return tuple(_round2(v) for v in [*values, last])


def query_heads(multipliers: tuple[float, ...], model_dim: int, head_dim: int, groups: int) -> tuple[int, ...]:
    """Query heads of each layer: ``multiplier * model_dim`` in whole groups of heads."""
    return tuple(make_divisible(model_dim * m, head_dim * groups) // head_dim for m in multipliers)


def _round2(value: float) -> float:
    # numpy.float64.__round__ scales, rounds half to even, and scales back; Python's own round() is decimal-exact
    # and would differ on a few inputs.
    return round(value * 100.0) / 100.0
