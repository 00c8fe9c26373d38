"""What tests of loading compare models by."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from openelm_mlx import device

PROMPT = [3, 141, 59, 26, 53, 58, 97]
CPU = device.backend() == "cpu"


def parameters(model: nn.Module) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


def dtypes(model: nn.Module) -> set[mx.Dtype]:
    return {p.dtype for p in parameters(model).values()}


def equal(a: nn.Module, b: nn.Module) -> bool:
    pa, pb = parameters(a), parameters(b)
    return pa.keys() == pb.keys() and all(mx.array_equal(pa[n], pb[n]).item() for n in pa)


def packed_layers(model: nn.Module) -> int:
    return sum(isinstance(m, (nn.QuantizedLinear, nn.QuantizedEmbedding)) for m in model.modules())
