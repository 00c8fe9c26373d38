"""The decoder's operations, composed for MLX's CPU backend; float32 only.

There, `mx.fast` falls back to unfused operations, and ``exp`` is computed one number at a time (12 ns each, against 0.3
for a multiplication). `exp` below is made of arithmetic that compilers turn into vector instructions, and `mx.compile`
fuses it with what surrounds it. Everything is as exact as what it replaces, and differentiable but for `exp` itself.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

_LOG2_E = 1.44269504088896341
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
"""ln 2 in two parts; the first has few bits, so that its multiples are exact (Cody and Waite, 1980)."""
_ROUND = 1.5 * 2**23
"""Added and taken away again, it rounds a float32 to a whole number, which then stands in the sum's lowest bits."""
_ROUND_BITS = 0x4B400000
_MOST = 88.0
"""Beyond it float32 has no exponential (nor, below its negative, a normal one)."""
_COEFFICIENTS = (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0)
"""The Taylor series of exp; on [-ln 2 / 2, ln 2 / 2] what is left out is below float32's precision."""


def exp(x: mx.array) -> mx.array:
    """The exponential, to about 1e-7 of its value; `x` beyond 87 or so either way counts as that."""
    x = mx.clip(x, -_MOST + 1, _MOST)
    shifted = x * _LOG2_E + _ROUND
    n = shifted - _ROUND
    rest = (x - n * _LN2_HIGH) - n * _LN2_LOW
    value = mx.array(_COEFFICIENTS[0])
    for c in _COEFFICIENTS[1:]:
        value = value * rest + c
    power_of_two = ((shifted.view(mx.int32) + (127 - _ROUND_BITS)) << 23).view(mx.float32)
    return value * power_of_two


_PIECE = 1 << 18
"""Elements worked on at a time: a megabyte stays in the processor's cache, and no large temporary is asked for."""


def swiglu(y: mx.array) -> mx.array:
    """SiLU of the first half of ``(B, L, 2 width)``, times the second."""
    step = max(1, _PIECE // (y.shape[0] * y.shape[2]))
    pieces: list[Any] = [_swiglu(y[:, i : i + step]) for i in range(0, y.shape[1], step)]
    return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=1)


@mx.custom_function
def _swiglu(y: mx.array) -> mx.array:
    return silu_times(*mx.split(y, 2, axis=-1))


@mx.compile
def silu_times(gate: mx.array, up: mx.array) -> mx.array:
    """SiLU of `gate`, times `up`; no gradient."""
    return gate / (1 + exp(-gate)) * up


@_swiglu.vjp
def _swiglu_gradient(y: mx.array, cotangent: mx.array, _: mx.array) -> mx.array:
    def plain(y: mx.array) -> mx.array:
        gate, up = mx.split(y, 2, axis=-1)
        return nn.silu(gate) * up

    return mx.vjp(plain, [y], [cotangent])[1][0]


@mx.compile
def rotate(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """RoPE, half-split: ``(B, any, L, head_dim)`` heads by angles ``(L, head_dim / 2)``."""
    a, b = mx.split(x, 2, axis=-1)
    return _turned(a, b, cos, sin)


@mx.compile
def normalize_and_rotate(x: mx.array, weight: mx.array, cos: mx.array, sin: mx.array, eps: float) -> mx.array:
    """RMSNorm of every head of ``(B, any, L, head_dim)``, with weights ``(any, 1, head_dim)``, then RoPE."""
    scale = mx.rsqrt(mx.square(x).mean(-1, keepdims=True) + eps)
    (a, b), (u, v) = mx.split(x, 2, axis=-1), mx.split(weight, 2, axis=-1)
    return _turned(a * scale * u, b * scale * v, cos, sin)


def _turned(a: mx.array, b: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    return mx.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def attention(q: mx.array, k: mx.array, v: mx.array, scale: float, *, causal: bool) -> mx.array:
    """Grouped-query attention.

    Args:
        q: ``(B, H, L, head_dim)``, at the last `L` of the keys' positions.
        k, v: ``(B, H_kv, S, head_dim)``.
        scale: of the scores.
        causal: whether a query sees only keys at its own and earlier positions.
    """
    return _attention(scale, causal)(q, k, v)


@cache
def _attention(scale: float, causal: bool) -> Any:
    @mx.custom_function
    def attend(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        return _attend(q, k, v, scale, causal)

    @attend.vjp
    def gradient(inputs: Any, cotangent: mx.array, _: mx.array) -> Any:
        def plain(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
            return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask="causal" if causal else None)

        return tuple(mx.vjp(plain, list(inputs), [cotangent])[1])

    return attend


def _attend(q: mx.array, k: mx.array, v: mx.array, scale: float, causal: bool) -> mx.array:
    B, H, L, D = q.shape
    H_kv, S = k.shape[1:3]
    groups = (q * scale).reshape(B, H_kv, H // H_kv, L, D)
    if not causal:
        scores = groups.reshape(B, H_kv, -1, D) @ k.swapaxes(-1, -2)
        return _weighted(scores, v).reshape(B, H, L, D)
    step = max(1, _PIECE // (B * H // H_kv * S))
    rows = [_rows(groups[:, :, :, i : i + step], k, v, S - L + i) for i in range(0, L, step)]
    return mx.concatenate(rows, axis=3).reshape(B, H, L, D)


def _rows(q: mx.array, k: mx.array, v: mx.array, first: int) -> mx.array:
    """Causal attention of ``(B, H_kv, group, rows, D)`` queries at positions from `first` on, a key head at a time."""
    B, H_kv, group, rows, D = q.shape
    S = first + rows
    keys, queries = mx.arange(S, dtype=mx.float32), mx.arange(first, S, dtype=mx.float32)[:, None]
    heads = []
    for h in range(H_kv):
        scores = q[:, h].reshape(B, -1, D) @ k[:, h, :S].swapaxes(-1, -2)  # (B, group * rows, S)
        masked = hide_later(scores.reshape(B, group, rows, S), queries, keys).reshape(B, -1, S)
        heads.append(_weighted(masked, v[:, h, :S]).reshape(B, group, rows, D))
    return mx.stack(heads, axis=1)


@mx.compile
def hide_later(scores: mx.array, queries: mx.array, keys: mx.array) -> mx.array:
    """Scores ``(..., rows, S)`` of queries at positions ``(rows, 1)``, those of later keys ``(S,)`` far below 0."""
    # Arithmetic, because a choice between two arrays takes ten times as long here.
    return scores + mx.minimum(queries - keys, 0) * 1e30


def _weighted(scores: mx.array, v: mx.array) -> mx.array:
    """Softmax of the scores, times the values."""
    weights = exp_of_difference(scores, scores.max(-1, keepdims=True))
    return (weights @ v) / weights.sum(-1, keepdims=True)


@mx.compile
def exp_of_difference(x: mx.array, most: mx.array) -> mx.array:
    """The exponential of ``x - most``; no gradient."""
    return exp(x - most)
