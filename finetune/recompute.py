"""Layers that the backward pass computes again instead of keeping what is inside of them: less memory, more time."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from openelm_mlx.model import OpenELM


def recompute_layers(model: OpenELM) -> None:
    """Let the backward pass compute each decoder layer again, in place. For the gradients that MLX derives itself."""
    for layer in model.layers:
        layer.__class__ = _recomputed(type(layer))
        for module in layer.modules():
            if type(module) is nn.Dropout:
                module.__class__ = _Dropout


def _recomputed(kind: Any) -> Any:
    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if not self.training:
            return kind.__call__(self, x, mask, cache)
        key = mx.random.randint(0, 1 << 31, (2,), dtype=mx.uint32)

        def run(parameters: Any, x: mx.array) -> mx.array:
            self.update(parameters)
            _Dropout.next_key = key
            return kind.__call__(self, x, mask, cache)

        return mx.checkpoint(run)(self.trainable_parameters(), x)

    return type(f"Recomputed{kind.__name__}", (kind,), {"__call__": call})


class _Dropout(nn.Dropout):
    """Hides the same when a layer is computed for the second time; MLX's would draw anew."""

    next_key: mx.array

    def __call__(self, x: mx.array) -> mx.array:
        keep = self._p_1
        if keep == 1 or not self.training:
            return x
        key, _Dropout.next_key = mx.random.split(_Dropout.next_key)
        return mx.random.bernoulli(keep, x.shape, key=key) * x * (1 / keep)
