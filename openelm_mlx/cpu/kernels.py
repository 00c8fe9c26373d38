"""RMSNorm and SwiGLU for training on MLX's CPU backend, with their gradients written out; float32.

Not for use under MLX's own differentiation, where nothing is fused: see `openelm_mlx.cpu.backprop`.
"""

from __future__ import annotations

import mlx.core as mx

from openelm_mlx.cpu import ops


def norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """RMSNorm of ``(..., D)``."""
    return _scaled(x, _inverse_rms(x, eps), weight)


def norm_gradient(x: mx.array, weight: mx.array, eps: float, cotangent: mx.array) -> mx.array:
    """The gradient by :func:`norm`'s input, from that by its output."""
    inverse = _inverse_rms(x, eps)
    return _norm_gradient(x, weight, inverse, _mean_product(x, weight, cotangent), cotangent)


def norm_weight_gradient(x: mx.array, eps: float, cotangent: mx.array) -> mx.array:
    """The gradient by :func:`norm`'s weight, ``(D,)``."""
    return _scaled(x, _inverse_rms(x, eps), cotangent).reshape(-1, x.shape[-1]).sum(0)


@mx.compile
def _inverse_rms(x: mx.array, eps: float) -> mx.array:
    return mx.rsqrt(mx.square(x).mean(-1, keepdims=True) + eps)


@mx.compile
def _scaled(x: mx.array, inverse: mx.array, weight: mx.array) -> mx.array:
    return x * inverse * weight


@mx.compile
def _mean_product(x: mx.array, weight: mx.array, cotangent: mx.array) -> mx.array:
    return (x * (cotangent * weight)).mean(-1, keepdims=True)


@mx.compile
def _norm_gradient(
    x: mx.array, weight: mx.array, inverse: mx.array, product: mx.array, cotangent: mx.array
) -> mx.array:
    return inverse * (cotangent * weight - x * (inverse * inverse * product))


def gated(gate: mx.array, up: mx.array) -> mx.array:
    """SiLU of `gate`, times `up`, both ``(..., width)``."""
    return _times_sigmoid(gate, _sigmoid(gate), up)


def gated_gradients(gate: mx.array, up: mx.array, cotangent: mx.array) -> tuple[mx.array, mx.array]:
    """Gradients by :func:`gated`'s arrays, from the gradient by its output."""
    sigmoid = _sigmoid(gate)
    return _gate_gradient(gate, sigmoid, up, cotangent), _times_sigmoid(gate, sigmoid, cotangent)


# Separate kernels: MLX breaks up a fused one of this size itself, and computes more of it twice.
@mx.compile
def _sigmoid(x: mx.array) -> mx.array:
    return 1 / (1 + ops.exp(-x))


@mx.compile
def _times_sigmoid(x: mx.array, sigmoid: mx.array, y: mx.array) -> mx.array:
    return x * sigmoid * y


@mx.compile
def _gate_gradient(gate: mx.array, sigmoid: mx.array, up: mx.array, cotangent: mx.array) -> mx.array:
    return cotangent * up * sigmoid * (1 + gate - gate * sigmoid)
