"""The layers: a frozen projection or embedding and its trained low-rank update.

Parameters have mlx-lm's names and layout (``lora_a``, ``lora_b``, ``m``; the base is ``linear`` or ``embedding``), so
that its adapters are ours. They are float32 and cast to what the model computes in.
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from openelm_mlx.adapters.config import AdapterConfig
from openelm_mlx.quantize import dequantized

PARTS = ("lora_a", "lora_b", "m")
"""Names of an adapter's own parameters."""

EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)


class LoRALinear(nn.Module):
    """``W x + scale * B A dropout(x)``.

    `lora_a` is ``(in, rank)``, random as PEFT's and mlx-lm's (uniform, within ``in ** -0.5``); `lora_b` is
    ``(rank, out)``, zero.
    """

    def __init__(self, base: nn.Module, config: AdapterConfig, key: mx.array) -> None:
        super().__init__()
        out, inputs = shape_of(base)
        self.linear = base
        self.scale = config.scale
        self.dropout = nn.Dropout(config.dropout)
        self.lora_a = mx.random.uniform(-1, 1, (inputs, config.rank), key=key) / math.sqrt(inputs)
        self.lora_b = mx.zeros((config.rank, out))

    def __call__(self, x: mx.array) -> mx.array:
        return self.add_update(self.linear(x), x)

    def add_update(self, y: mx.array, x: mx.array, outputs: slice = slice(None)) -> mx.array:
        """`y`, which is ``W x`` for some of the outputs, and the update for the same."""
        # Scaled while it is narrow: addmm's own factor would be another pass over what is wide, in the backward pass.
        z = self.scale * (self.dropout(x) @ self.lora_a.astype(x.dtype))
        return mx.addmm(y, z, self.lora_b[:, outputs].astype(x.dtype))

    @property
    def base(self) -> nn.Module:
        """The layer without the update."""
        return self.linear

    def update_matrix(self) -> mx.array:
        """``scale * B A`` as a matrix ``(out, in)``, float32."""
        return self.scale * (self.lora_a @ self.lora_b).T

    def fused_weight(self) -> mx.array:
        """The weight ``(out, in)`` of the plain layer that does the same; float32."""
        return weight_of(self.linear) + self.update_matrix()


class DoRALinear(LoRALinear):
    """``m * (W + scale * B A) x / |W + scale * B A|``, row by row; the norm has no gradient.

    `m` is ``(out,)`` and begins as the base weight's row norms, so that the layer begins as the base. Dropout is on the
    update's inputs only, as in mlx-lm.
    """

    def __init__(self, base: nn.Module, config: AdapterConfig, key: mx.array) -> None:
        super().__init__(base, config, key)
        # Kept by the base's rows: the norm of the sum needs no sum of matrices then, only products with thin ones.
        self._base_square = mx.square(weight_of(base)).sum(1)
        self.m = mx.sqrt(self._base_square)
        self._known: tuple[Any, ...] = ()

    def add_update(self, y: mx.array, x: mx.array, outputs: slice = slice(None)) -> mx.array:
        return super().add_update(y, x, outputs) * self.factor()[outputs].astype(x.dtype)

    def settle(self) -> None:
        """Work out what depends on the base alone; as long as it is lazy, a compiled step would do so every time."""
        mx.eval(self._base_square)

    def factor(self) -> mx.array:
        """``m / |W + scale * B A|``, ``(out,)`` float32."""
        if self.training:
            return self.m / self._norm()
        mine = (self.m, self.lora_a, self.lora_b)
        if not (self._known and all(old is new for old, new in zip(self._known, mine, strict=False))):
            self._known = (*mine, self.m / self._norm())  # as long as nobody changes the adapter
        return self._known[-1]

    def _norm(self) -> mx.array:
        a, b = mx.stop_gradient(self.lora_a), mx.stop_gradient(self.lora_b)
        across = (weight_of(self.linear) @ a * b.T).sum(1)  # of W and B A, (out,)
        own = ((a.T @ a @ b) * b).sum(0)
        square = self._base_square + 2 * self.scale * across + self.scale**2 * own
        return mx.sqrt(mx.maximum(square, 1e-24))

    def fused_weight(self) -> mx.array:
        adapted = super().fused_weight()
        return adapted * (self.m / mx.sqrt(mx.square(adapted).sum(1)))[:, None]


class LoRAEmbedding(nn.Module):
    """An embedding with ``scale * A[token] B`` added to its vectors.

    `lora_a` is ``(vocab_size, rank)``, zero, and `lora_b` ``(rank, model_dim)``, normal, as in PEFT. As an output head
    (tied embeddings) it is the base alone, as in CoreNet; mlx-lm adds the update there too.
    """

    def __init__(self, base: nn.Module, config: AdapterConfig, key: mx.array) -> None:
        super().__init__()
        rows, width = shape_of(base)
        self.embedding = base
        self.scale = config.scale
        self.dropout = nn.Dropout(config.dropout)
        self.lora_a = mx.zeros((rows, config.rank))
        self.lora_b = mx.random.normal((config.rank, width), key=key)

    def __call__(self, ids: mx.array) -> mx.array:
        y = self.embedding(ids)
        update = self.dropout(self.lora_a[ids].astype(y.dtype) @ self.lora_b.astype(y.dtype))
        return y + self.scale * update

    def as_linear(self, x: mx.array) -> mx.array:
        """Logits of ``(..., D)`` vectors, by the base weight alone."""
        return self.embedding.as_linear(x)

    @property
    def base(self) -> nn.Module:
        """The embedding without the update."""
        return self.embedding

    def update_matrix(self) -> mx.array:
        """What is added to the embedding's rows, ``(vocab_size, model_dim)`` float32."""
        return self.scale * (self.lora_a @ self.lora_b)

    def fused_weight(self) -> mx.array:
        """The rows ``(vocab_size, model_dim)`` of the plain embedding that does the same; float32."""
        return weight_of(self.embedding) + self.update_matrix()


ADAPTED = (LoRALinear, LoRAEmbedding)
"""All of them: DoRALinear is a LoRALinear."""


def adapted(base: nn.Module, config: AdapterConfig, key: mx.array) -> nn.Module:
    """`base` with a new adapter beside it."""
    if isinstance(base, EMBEDDINGS):
        return LoRAEmbedding(base, config, key)
    return (DoRALinear if config.method == "dora" else LoRALinear)(base, config, key)


def shape_of(layer: nn.Module) -> tuple[int, int]:
    """``(out, in)`` of a projection, ``(rows, width)`` of an embedding; packed or not."""
    rows, columns = layer.weight.shape
    return rows, columns * 32 // layer.bits if hasattr(layer, "bits") else columns


def weight_of(layer: nn.Module) -> mx.array:
    """A layer's weight in float32, unpacked."""
    return dequantized(layer, mx.float32).weight.astype(mx.float32)
