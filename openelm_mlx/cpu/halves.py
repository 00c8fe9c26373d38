"""Layers whose weights stay in bfloat16 on a CPU and are multiplied in float32.

Half the memory of float32 weights and, where reading them sets the pace, up to twice the speed; the products are those
of the same weights in float32. Needs our own ``cblas_sgemm``: blas.c tells how bfloat16 gets through it. There are
gradients in training (``model.train()``), where the weights are cast for every product.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import mlx.core as mx
import mlx.nn as nn

from openelm_mlx.cpu import blas

_SMALLEST = 4


def possible() -> bool:
    """Whether there is something to multiply bfloat16 matrices with."""
    return blas.bfloat16_alpha is not None and _comes_out_right(blas.bfloat16_alpha)


@cache
def _comes_out_right(alpha: float) -> bool:
    # Another MLX may call another function, or with other numbers. The products would be nonsense, and nobody told.
    x, weight = mx.ones((3, 64)), mx.arange(4 * 64).reshape(4, 64).astype(mx.bfloat16)
    return bool(mx.array_equal(_multiply(x, weight, alpha), _plain(x, weight)))


def keep(model: nn.Module) -> None:
    """Let a model's bfloat16 matrices stay as they are, if there is something to multiply them with; in place."""
    if not possible():
        return
    for layer in model.modules():
        kind = _REPLACEMENT.get(type(layer))
        if kind and layer.weight.dtype == mx.bfloat16 and fits(layer.weight.shape) and "bias" not in layer:
            layer.__class__ = kind


def fits(shape: Sequence[int]) -> bool:
    """Whether weights of this shape can stay: a matrix with an even number of rows, and not too small."""
    # Two rows make one of floats. Of a single one MLX could not tell whether it lies there transposed, and would say
    # either.
    return len(shape) == 2 and shape[0] % 2 == 0 and min(shape) >= _SMALLEST


class HalfLinear(nn.Linear):
    """A projection of float32 activations by bfloat16 weights."""

    def __call__(self, x: mx.array) -> mx.array:
        return _times(x, self)


class HalfEmbedding(nn.Embedding):
    """An embedding table in bfloat16 that gives float32 vectors, and float32 logits."""

    def __call__(self, x: mx.array) -> mx.array:
        return self.weight[x].astype(mx.float32)

    def as_linear(self, x: mx.array) -> mx.array:
        """Logits of ``(..., D)`` float32 vectors."""
        return _times(x, self)


KINDS = (HalfLinear, HalfEmbedding)
_REPLACEMENT: dict[type, type] = {nn.Linear: HalfLinear, nn.Embedding: HalfEmbedding}


def _times(x: mx.array, layer: nn.Module) -> mx.array:
    # Someone may have cast the model since.
    plain = layer.training or layer.weight.dtype != mx.bfloat16
    return _plain(x, layer.weight) if plain else multiply(x, layer.weight)


def _plain(x: mx.array, weight: mx.array) -> mx.array:
    return x @ weight.astype(mx.float32).T


def multiply(x: mx.array, weight: mx.array) -> mx.array:
    """``(..., K)`` float32 times ``(N, K)`` bfloat16 weights: ``(..., N)`` float32. Has no gradient, and says so."""
    assert blas.bfloat16_alpha is not None
    return _multiply(x, weight, blas.bfloat16_alpha)


def _multiply(x: mx.array, weight: mx.array, alpha: float) -> mx.array:
    rows = x.reshape(-1, x.shape[-1])
    words = weight.reshape(weight.shape[0] // 2, -1).view(mx.float32)  # (N / 2, K), each two rows of the weights
    found = mx.addmm(mx.zeros(1), mx.concatenate([rows, rows]), words.T, alpha=alpha, beta=0.0)
    # What MLX takes for the gradient of this product would be wrong; it has none for a view, and raises an error.
    return found.view(mx.uint32).view(mx.float32).reshape(*x.shape[:-1], -1)
