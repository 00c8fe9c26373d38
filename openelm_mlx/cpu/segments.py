"""Attention for training on MLX's CPU backend: document by document, with its gradients written out; float32.

It computes what the documents hold and no more. Not for use under MLX's own differentiation, where nothing is fused:
see `openelm_mlx.cpu.backprop`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import mlx.core as mx

from openelm_mlx.cpu import ops

_SCORES = 1 << 18
"""Worked on at a time: they stay in the processor's cache."""
_ROWS = 64
"""Fewer queries at a time would make more of small products than they save."""
_KEPT = 512
"""Longest segment whose weights are kept for the backward pass. A token's are then no more than its other activations;
those of longer ones are computed again."""

Weights = tuple[mx.array, mx.array]
"""Exponentials of some queries' scores, and one over their sums."""


@dataclass(frozen=True)
class Segment:
    """Where a document lies, or several that lie alike: in these rows, from `start` to before `stop`."""

    rows: range
    start: int
    stop: int


def segments(documents: Sequence[Sequence[int]]) -> list[Segment]:
    """Where the documents of each row lie, from their lengths; in the order of rows, then of places."""
    if all(len(lengths) == 1 for lengths in documents):
        # What pads a row comes after its document, and is seen by nothing in it.
        return [Segment(range(len(documents)), 0, max(lengths[0] for lengths in documents))]
    found = []
    for row, lengths in enumerate(documents):
        ends = list(accumulate(lengths))
        found += [Segment(range(row, row + 1), end - n, end) for n, end in zip(lengths, ends, strict=True)]
    return found


def attention(q: mx.array, k: mx.array, v: mx.array, where: Sequence[Segment]) -> tuple[mx.array, list[list[Weights]]]:
    """Causal grouped-query attention inside each segment, and what of it :func:`attention_gradients` can use again.

    Args:
        q: ``(B, H, L, head_dim)``, scaled.
        k, v: ``(B, H_kv, L, head_dim)``.
        where: from :func:`segments`; the output outside of them is 0.
    """
    outputs, kept = [], []
    for s in where:
        out, weights = _forward(_heads(q, k, s), _cut(k, s), _cut(v, s))
        outputs.append(out)
        kept.append(weights if s.stop - s.start <= _KEPT else [])
    return _assembled(outputs, where, q.shape), kept


def attention_gradients(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    where: Sequence[Segment],
    kept: Sequence[Sequence[Weights]],
    output: mx.array,
    cotangent: mx.array,
) -> tuple[mx.array, mx.array, mx.array]:
    """Gradients by :func:`attention`'s arrays, from what it gave and the gradient by its output."""
    found = []
    for s, weights in zip(where, kept, strict=True):
        like_q = [_heads(x, k, s) for x in (q, cotangent, output)]
        found.append(_backward(weights, like_q[0], _cut(k, s), _cut(v, s), *like_q[1:]))
    dq, dk, dv = (
        _assembled(list(parts), where, x.shape) for parts, x in zip(zip(*found, strict=True), (q, k, v), strict=True)
    )
    return dq, dk, dv


def _cut(x: mx.array, s: Segment) -> mx.array:
    return x[s.rows.start : s.rows.stop, :, s.start : s.stop]


def _heads(x: mx.array, k: mx.array, s: Segment) -> mx.array:
    """A segment of queries, ``(R, H_kv, group, n, head_dim)``: those that share a key-value head together."""
    part = _cut(x, s)
    R, H, n, D = part.shape
    return part.reshape(R, k.shape[1], H // k.shape[1], n, D)


def _assembled(parts: Sequence[mx.array], where: Sequence[Segment], shape: Sequence[int]) -> mx.array:
    """What was computed of each segment put in its place in a ``(B, heads, L, head_dim)`` array."""
    _, heads, length, width = shape
    bands: list[mx.array] = []
    band: list[mx.array] = []
    end = 0
    for number, (part, s) in enumerate(zip(parts, where, strict=True)):
        band.append(part.reshape(len(s.rows), heads, -1, width))
        end = s.stop
        if number + 1 == len(where) or where[number + 1].rows != s.rows:
            if end < length:
                band.append(mx.zeros((len(s.rows), heads, length - end, width)))
            bands.append(band[0] if len(band) == 1 else mx.concatenate(band, axis=2))
            band = []
    return bands[0] if len(bands) == 1 else mx.concatenate(bands)


def _blocks(q: mx.array) -> list[tuple[int, int]]:
    """Ranges of queries to work on at a time."""
    R, H_kv, group, n, _ = q.shape
    step = max(_ROWS, _SCORES // (R * H_kv * group * n))
    return [(i, min(i + step, n)) for i in range(0, n, step)]


def _rows(x: mx.array, i: int, j: int) -> mx.array:
    """Queries from `i` to before `j` of each head, those of a group one after another: ``(R, H_kv, rows, D)``."""
    R, H_kv, _, _, D = x.shape
    return x[:, :, :, i:j].reshape(R, H_kv, -1, D)


def _weights(q: mx.array, k: mx.array, first: int, group: int) -> Weights:
    """Of causal attention of rows of queries, those of each group at `first` and on, to keys ``(R, H_kv, S, D)``."""
    scores = q @ k.swapaxes(-1, -2)
    R, H_kv, rows, S = scores.shape
    keys = mx.arange(S, dtype=mx.float32)
    queries = mx.arange(first, first + rows // group, dtype=mx.float32)[:, None]
    masked = ops.hide_later(scores.reshape(R, H_kv, group, -1, S), queries, keys).reshape(scores.shape)
    weights = ops.exp_of_difference(masked, masked.max(-1, keepdims=True))
    return weights, 1 / weights.sum(-1, keepdims=True)


def _forward(q: mx.array, k: mx.array, v: mx.array) -> tuple[mx.array, list[Weights]]:
    R, H_kv, group, _, D = q.shape
    out, kept = [], []
    for i, j in _blocks(q):
        weights, share = _weights(_rows(q, i, j), k[:, :, :j], i, group)
        out.append(((weights @ v[:, :, :j]) * share).reshape(R, H_kv, group, j - i, D))
        kept.append((weights, share))
    return mx.concatenate(out, axis=3), kept


def _backward(
    kept: Sequence[Weights], q: mx.array, k: mx.array, v: mx.array, cotangent: mx.array, output: mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    """Gradients by queries, keys and values of a segment."""
    R, H_kv, group, _, D = q.shape
    dq, dk, dv = [], mx.zeros_like(k), mx.zeros_like(v)
    for number, (i, j) in enumerate(_blocks(q)):
        rows, keys = _rows(q, i, j), k[:, :, :j]
        weights, share = kept[number] if kept else _weights(rows, keys, i, group)
        given = _rows(cotangent, i, j) * share
        mean = (given * _rows(output, i, j)).sum(-1, keepdims=True)
        changes = _score_gradient(weights, given @ v[:, :, :j].swapaxes(-1, -2), mean)
        dq.append((changes @ keys).reshape(R, H_kv, group, j - i, D))
        dk = _added(dk, changes.swapaxes(-1, -2) @ rows)
        dv = _added(dv, weights.swapaxes(-1, -2) @ given)
    return mx.concatenate(dq, axis=3), dk, dv


@mx.compile
def _score_gradient(weights: mx.array, changes: mx.array, mean: mx.array) -> mx.array:
    return weights * (changes - mean)


def _added(total: mx.array, part: mx.array) -> mx.array:
    """`total` with `part` added to its first positions, ``(R, H_kv, n, D)``."""
    missing = total.shape[2] - part.shape[2]
    return total + (mx.pad(part, [(0, 0), (0, 0), (0, missing), (0, 0)]) if missing else part)
