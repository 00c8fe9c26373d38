"""Packed layers become float32 ones: on a CPU, MLX's packed matrix product is of no use."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from openelm_mlx.quantize import dequantized

_PACKED = (nn.QuantizedLinear, nn.QuantizedEmbedding)


def float32_bytes(model: nn.Module) -> int:
    """Bytes of the packed layers' weights once they are float32."""
    return sum(m.weight.size * 32 // m.bits * 4 for m in model.modules() if isinstance(m, _PACKED))


def unpack(model: nn.Module) -> None:
    """Replace packed layers by float32 ones of the same values, in place; nothing is evaluated yet.

    MLX's packed matrix product is hundreds of times slower on a CPU than a float32 one through a good BLAS.
    """
    packed = [(path, layer) for path, layer in model.named_modules() if isinstance(layer, _PACKED)]
    plain: Any = tree_unflatten([(path, dequantized(layer, mx.float32)) for path, layer in packed])
    model.update_modules(plain)
