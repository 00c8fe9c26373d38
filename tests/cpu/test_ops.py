"""The composed operations against float64, MLX's own, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
import pytest

from openelm_mlx import device
from openelm_mlx.cpu import ops
from openelm_mlx.model import rope_angles

pytestmark = pytest.mark.skipif(device.backend() != "cpu", reason="made for the CPU backend")

Array = npt.NDArray[np.float64]


def normal(*shape: int, seed: int = 0, scale: float = 1) -> mx.array:
    return mx.random.normal(shape, scale=scale, key=mx.random.key(seed))


def exactly(x: mx.array) -> Array:
    return np.asarray(x).astype(np.float64)


def worst(found: mx.array, expected: mx.array | Array) -> float:
    """Largest difference, relative to the largest value."""
    wanted = exactly(expected) if isinstance(expected, mx.array) else expected
    assert found.shape == wanted.shape
    assert found.dtype == mx.float32
    return float(np.abs(exactly(found) - wanted).max() / np.abs(wanted).max())


class TestExp:
    @pytest.mark.parametrize("exp", [ops.exp, mx.compile(ops.exp)], ids=["plain", "compiled"])
    def test_relative_error(self, exp: Callable[[mx.array], mx.array]) -> None:
        x = np.concatenate([np.linspace(-86, 87, 400_001), np.linspace(-1, 1, 100_001), np.arange(-86, 87) * np.log(2)])
        x = x[(x >= -86) & (x <= 87)].astype(np.float32)
        expected = np.exp(x.astype(np.float64))
        assert np.abs(exactly(exp(mx.array(x))) / expected - 1).max() <= 2e-7

    @pytest.mark.parametrize("exp", [ops.exp, mx.compile(ops.exp)], ids=["plain", "compiled"])
    def test_edges(self, exp: Callable[[mx.array], mx.array]) -> None:
        x = [0.0, -0.0, 1e-45, -1e-45, 1e-39, math.nan, math.inf, 1e30, -math.inf, -1e30]
        found = exp(mx.array(x)).tolist()
        assert found[:5] == [1.0] * 5  # type: ignore[index]
        assert math.isnan(found[5])  # type: ignore[index, arg-type]
        e88 = pytest.approx(math.exp(88), rel=1e-6)
        assert found[6:8] == [e88, e88]  # type: ignore[index]  # finite: no NaN comes of two of them
        assert all(0 <= y < 2e-38 for y in found[8:])  # type: ignore[index, operator]

    def test_it_never_falls(self) -> None:
        x = mx.array(np.sort(np.random.default_rng(0).uniform(-90, 90, 200_000)).astype(np.float32))
        y = exactly(ops.exp(x))
        assert (np.diff(y) >= -2e-7 * y[1:]).all()


def silu_gate(y: Array) -> Array:
    gate, up = np.split(y, 2, axis=-1)
    return gate / (1 + np.exp(-gate)) * up


class TestSwiglu:
    @pytest.mark.parametrize("shape", [(1, 1, 8), (1, 37, 10), (3, 5, 64), (2, 1, 6)])
    @pytest.mark.parametrize("piece", [1, 100, 1 << 18])
    def test_in_any_number_of_pieces(self, shape: tuple[int, ...], piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ops, "_PIECE", piece)
        y = normal(*shape, scale=4)
        assert worst(ops.swiglu(y), silu_gate(exactly(y))) < 1e-6

    def test_a_piece_of_the_real_size(self) -> None:
        y = normal(2, 70, 5000, scale=2)
        assert y.size > 2 * ops._PIECE
        assert worst(ops.swiglu(y), silu_gate(exactly(y))) < 1e-6

    def test_large_and_no_numbers(self) -> None:
        gates = mx.array([-1e30, -1e4, -100.0, 100.0, 1e4, 1e30, math.nan, math.inf])
        found = ops.swiglu(mx.stack([gates, mx.full(8, 2.0)], axis=-1)[None])[0, :, 0].tolist()
        assert [abs(x) for x in found[:3]] == pytest.approx([0, 0, 0], abs=1e-7)  # type: ignore[index, arg-type]
        assert found[3:6] == pytest.approx([200, 2e4, 2e30])  # type: ignore[index]
        assert [math.isnan(found[6]), found[7]] == [True, math.inf]  # type: ignore[index, arg-type]
        large = mx.array([[[-60.0, 3e38]]])  # the two multiplied first would be infinite
        assert float(ops.swiglu(large)) == pytest.approx(-60 * math.exp(-60) * 3e38, rel=1e-5)

    @pytest.mark.parametrize("piece", [20, 1 << 18])
    def test_gradient(self, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ops, "_PIECE", piece)
        y, weight = normal(2, 9, 12), normal(2, 9, 6, seed=1)

        def plain(y: mx.array) -> mx.array:
            gate, up = mx.split(y, 2, axis=-1)
            return (nn.silu(gate) * up * weight).sum()

        found = mx.grad(lambda y: (ops.swiglu(y) * weight).sum())(y)
        assert worst(found, mx.grad(plain)(y)) < 1e-6

    def test_inside_compile(self) -> None:
        y = normal(1, 5, 12)
        assert worst(mx.compile(lambda y: ops.swiglu(y) * 2)(y), 2 * silu_gate(exactly(y))) < 1e-6


class TestRotation:
    """Against `mx.fast`, at positions from `offset` on."""

    @staticmethod
    def inputs(B: int, heads: int, L: int, head_dim: int) -> tuple[mx.array, mx.array]:
        return normal(B, heads, L, head_dim, scale=3), 1 + normal(heads, 1, head_dim, seed=1, scale=0.3)

    @staticmethod
    def fast(x: mx.array, weight: mx.array | None, offset: int, base: float, eps: float) -> mx.array:
        if weight is not None:
            x = mx.fast.rms_norm(x, None, eps) * weight
        return mx.fast.rope(x, x.shape[-1], traditional=False, base=base, scale=1.0, offset=offset)

    @staticmethod
    def at(offset: int, length: int, head_dim: int, base: float) -> tuple[mx.array, mx.array]:
        cos, sin = rope_angles(mx.arange(offset + length), head_dim, base)
        return cos[offset:], sin[offset:]

    @pytest.mark.parametrize(
        ("B", "heads", "L", "head_dim"), [(1, 5, 1, 64), (2, 3, 17, 128), (1, 20, 36, 64), (3, 1, 4, 2)]
    )
    @pytest.mark.parametrize("offset", [0, 1, 1500])
    def test_norm_and_rotation(self, B: int, heads: int, L: int, head_dim: int, offset: int) -> None:
        x, weight = self.inputs(B, heads, L, head_dim)
        for base, eps in ((10000.0, 1e-6), (50.0, 0.3)):
            angles = self.at(offset, L, head_dim, base)
            found = ops.normalize_and_rotate(x, weight, *angles, eps)
            assert worst(found, self.fast(x, weight, offset, base, eps)) < 1e-4 * (offset > 9) + 2e-6
            assert worst(ops.rotate(x, *angles), self.fast(x, None, offset, base, eps)) < 1e-4 * (offset > 9) + 2e-6

    def test_angles(self) -> None:
        """Against float64: frequencies and products have float32's rounding, as in CoreNet."""
        cos, sin = (exactly(x) for x in rope_angles(mx.arange(300), 64, 10000.0))
        angle = np.arange(300)[:, None] / 10000.0 ** (np.arange(0, 64, 2) / 64)
        assert cos.shape == sin.shape == (300, 32)
        assert max(np.abs(cos - np.cos(angle)).max(), np.abs(sin - np.sin(angle)).max()) < 300 * 2e-7

    def test_zeros_stay_zeros(self) -> None:
        angles = rope_angles(mx.arange(3), 8, 1e4)
        found = ops.normalize_and_rotate(mx.zeros((1, 2, 3, 8)), mx.ones((2, 1, 8)), *angles, 1e-6)
        assert not found.any()

    def test_gradients(self) -> None:
        x, weight = self.inputs(2, 3, 5, 8)
        target, angles = normal(2, 3, 5, 8, seed=2), self.at(4, 5, 8, 1e4)

        def fused(x: mx.array, weight: mx.array) -> mx.array:
            return (ops.normalize_and_rotate(x, weight, *angles, 1e-6) * target).sum()

        def plain(x: mx.array, weight: mx.array) -> mx.array:
            return (self.fast(x, weight, 4, 1e4, 1e-6) * target).sum()

        for found, expected in zip(mx.grad(fused, (0, 1))(x, weight), mx.grad(plain, (0, 1))(x, weight), strict=True):
            assert worst(found, expected) < 1e-5
        found = mx.grad(lambda x: (ops.rotate(x, *angles) * target).sum())(x)
        assert worst(found, mx.grad(lambda x: (self.fast(x, None, 4, 1e4, 1e-6) * target).sum())(x)) < 1e-5

    def test_inside_a_compiled_gradient(self) -> None:
        x, weight = self.inputs(1, 3, 5, 8)
        angles = self.at(0, 5, 8, 1e4)
        gradient = mx.grad(lambda w: ops.normalize_and_rotate(x, w, *angles, 1e-6).sum())
        assert worst(mx.compile(gradient)(weight), gradient(weight)) < 1e-6


def softmax_attention(q: mx.array, k: mx.array, v: mx.array, scale: float, causal: bool) -> Array:
    """In float64, head by head."""
    Q, K, V = exactly(q), exactly(k), exactly(v)
    H, L, S = Q.shape[1], Q.shape[2], K.shape[2]
    K, V = (np.repeat(x, H // x.shape[1], axis=1) for x in (K, V))
    scores = Q @ K.swapaxes(-1, -2) * scale
    if causal:
        scores = np.where(np.arange(S) <= np.arange(S - L, S)[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ V


SHAPES = [
    # B, H, H_kv, L, S, head_dim
    (1, 4, 1, 1, 1, 64),
    (1, 12, 3, 1, 77, 64),
    (1, 20, 5, 36, 36, 64),
    (2, 6, 2, 7, 30, 128),
    (1, 3, 3, 16, 16, 128),
    (2, 4, 4, 1, 9, 64),
    (3, 8, 2, 5, 260, 64),
]


def tensors(B: int, H: int, H_kv: int, L: int, S: int, D: int) -> tuple[mx.array, mx.array, mx.array]:
    return normal(B, H, L, D, seed=1), normal(B, H_kv, S, D, seed=2), normal(B, H_kv, S, D, seed=3)


def fast_attention(q: mx.array, k: mx.array, v: mx.array, scale: float, causal: bool) -> mx.array:
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask="causal" if causal else None)


class TestAttention:
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("piece", [1, 500, 1 << 18])
    def test_values(self, shape: tuple[int, ...], causal: bool, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ops, "_PIECE", piece)
        q, k, v = tensors(*shape)
        scale = shape[-1] ** -0.5
        found = ops.attention(q, k, v, scale, causal=causal)
        assert worst(found, softmax_attention(q, k, v, scale, causal)) < 2e-6
        assert worst(found, fast_attention(q, k, v, scale, causal)) < 2e-6

    def test_a_piece_of_the_real_size(self) -> None:
        q, k, v = tensors(1, 8, 2, 600, 700, 64)
        assert q.size // 64 * 700 > 8 * ops._PIECE
        assert worst(ops.attention(q, k, v, 0.125, causal=True), softmax_attention(q, k, v, 0.125, True)) < 2e-6

    def test_keys_that_lie_apart(self) -> None:
        """As a cache holds them: the first positions of longer arrays."""
        q, k, v = tensors(1, 6, 2, 3, 50, 64)
        for causal in (True, False):
            found = ops.attention(q, k[:, :, :20], v[:, :, :20], 0.1, causal=causal)
            assert worst(found, softmax_attention(q, k[:, :, :20], v[:, :, :20], 0.1, causal)) < 2e-6

    def test_the_future_has_no_weight_at_all(self) -> None:
        q, k, v = tensors(1, 4, 2, 6, 10, 64)
        later = mx.arange(10)[:, None] > 6
        far_k, far_v = mx.where(later, k * 1e3, k), mx.where(later, v * 1e6, v)
        first = ops.attention(q, k, v, 0.1, causal=True)[:, :, :3]
        assert worst(ops.attention(q, far_k, far_v, 0.1, causal=True)[:, :, :3], first) < 1e-6

    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("size", [1e2, 1e4])
    def test_extreme_scores(self, causal: bool, size: float) -> None:
        shape = (1, 4, 2, 9, 30, 64)
        q, k, v = tensors(*shape)
        q = q * size  # scores of some ten thousands
        found = ops.attention(q, k, v, 0.125, causal=causal)
        assert float(mx.abs((q[:, :2] * 0.125) @ k[:, :1].swapaxes(-1, -2)).max()) > size
        assert worst(found, softmax_attention(q, k, v, 0.125, causal)) < size * 1e-6
        assert bool(mx.isfinite(found).all())

    def test_all_scores_alike(self) -> None:
        q, k, v = tensors(1, 2, 1, 4, 8, 64)
        for level in (-1e4, 0.0, 1e4):
            key = mx.full(k.shape, level / 64)
            found = ops.attention(mx.ones(q.shape), key, v, 1.0, causal=False)
            assert worst(found, mx.broadcast_to(v.mean(2, keepdims=True), found.shape)) < 2e-6

    def test_what_is_no_number_is_seen(self) -> None:
        q, k, v = tensors(1, 2, 1, 4, 8, 64)
        k[0, 0, 6, 0] = math.nan
        assert mx.isnan(ops.attention(q, k, v, 0.125, causal=True)[:, :, 2:]).all()
        assert mx.isnan(ops.attention(q, k, v, 0.125, causal=False)).all()
        assert not mx.isnan(ops.attention(q[:, :, :2], k[:, :, :6], v[:, :, :6], 0.125, causal=True)).any()

    @pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[3], SHAPES[4]])
    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("piece", [200, 1 << 18])
    def test_gradients(self, shape: tuple[int, ...], causal: bool, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ops, "_PIECE", piece)
        inputs = tensors(*shape)
        target = normal(*inputs[0].shape, seed=4)

        def gradients(attend: Any) -> Any:
            return mx.grad(lambda q, k, v: (attend(q, k, v) * target).sum(), (0, 1, 2))(*inputs)

        found = gradients(lambda q, k, v: ops.attention(q, k, v, 0.125, causal=causal))
        for ours, theirs in zip(found, gradients(lambda q, k, v: fast_attention(q, k, v, 0.125, causal)), strict=True):
            assert worst(ours, theirs) < 1e-5

    def test_inside_compile(self) -> None:
        q, k, v = tensors(*SHAPES[3])
        for causal in (True, False):
            compiled = mx.compile(lambda q, k, v, causal=causal: ops.attention(q, k, v, 0.1, causal=causal) + 0)
            assert worst(compiled(q, k, v), softmax_attention(q, k, v, 0.1, causal)) < 2e-6
