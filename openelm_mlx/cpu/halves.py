"""Layers whose weights stay in bfloat16 on a CPU and are multiplied in float32.

Half the memory of float32 weights and, where reading them sets the pace, up to twice the speed; the products are those
of the same weights in float32. Needs our own ``cblas_sgemm``: blas.c tells how bfloat16 gets through it.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from openelm_mlx.cpu import blas

_SMALLEST = 4


def possible() -> bool:
    """Whether there is something to multiply bfloat16 matrices with."""
    return blas.bfloat16_alpha is not None


def keep(model: nn.Module) -> None:
    """Let a model's bfloat16 matrices stay as they are, if there is something to multiply them with; in place."""
    if not possible():
        return
    for layer in model.modules():
        kind = _REPLACEMENT.get(type(layer))
        if kind and _fits(layer.weight) and "bias" not in layer:
            layer.__class__ = kind


def _fits(weight: mx.array) -> bool:
    # Two rows make one of floats. Of a single one MLX could not tell whether it lies there transposed, and would say
    # either.
    return weight.dtype == mx.bfloat16 and weight.shape[0] % 2 == 0 and min(weight.shape) >= _SMALLEST


class HalfLinear(nn.Linear):
    """A projection of float32 activations by bfloat16 weights."""

    def __call__(self, x: mx.array) -> mx.array:
        return _plain(x, self.weight) if self.training else product(x, self.weight)


class HalfEmbedding(nn.Embedding):
    """An embedding table in bfloat16 that gives float32 vectors, and float32 logits."""

    def __call__(self, x: mx.array) -> mx.array:
        return self.weight[x].astype(mx.float32)

    def as_linear(self, x: mx.array) -> mx.array:
        """Logits of ``(..., D)`` float32 vectors."""
        return _plain(x, self.weight) if self.training else product(x, self.weight)


KINDS = (HalfLinear, HalfEmbedding)
_REPLACEMENT: dict[type, type] = {nn.Linear: HalfLinear, nn.Embedding: HalfEmbedding}


def _plain(x: mx.array, weight: mx.array) -> mx.array:
    return x @ weight.astype(mx.float32).T


def _multiply(x: mx.array, weight: mx.array) -> mx.array:
    """``(..., K)`` float32 times ``(N, K)`` bfloat16 weights: ``(..., N)`` float32."""
    rows = x.astype(mx.float32).reshape(-1, x.shape[-1])
    words = weight.reshape(weight.shape[0] // 2, -1).view(mx.float32)  # (N / 2, K), each two rows of the weights
    assert blas.bfloat16_alpha is not None
    found = mx.addmm(mx.zeros(1), mx.concatenate([rows, rows]), words.T, alpha=blas.bfloat16_alpha, beta=0.0)
    return found.reshape(*x.shape[:-1], -1)


product: Any = mx.custom_function(_multiply)


def _gradient(inputs: Any, cotangent: mx.array, _: mx.array) -> Any:
    return tuple(mx.vjp(_plain, list(inputs), [cotangent])[1])


product.vjp(_gradient)
