"""The decoder's layers for MLX's CPU backend, put in place of the plain ones at load."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from openelm_mlx.cache import Mask
from openelm_mlx.config import OpenELMConfig
from openelm_mlx.cpu import ops
from openelm_mlx.model import Attention, FeedForward, OpenELM, rope_angles


def speed_up(model: OpenELM) -> None:
    """Replace a float32 model's layers by ones made for a CPU, in place. Parameters and their names stay.

    A model that is cast to another dtype afterwards uses the plain operations. Gradients go through ours. In training
    (``model.train()``) the plain operations are used all the same where ours have gradients of their own, because
    MLX 0.32 cannot compile such functions in a training step.
    """
    angles = Angles(model.config)
    for layer in model.layers:
        layer.attn.__class__ = CpuAttention
        layer.attn._angles = angles
        layer.ffn.__class__ = CpuFeedForward


class Angles:
    """RoPE's cosines and sines: computed once, shared by all layers of a model and all steps."""

    def __init__(self, config: OpenELMConfig) -> None:
        self._head_dim, self._base = config.head_dim, float(config.rope_freq_constant)
        self._make(config.max_context_length)

    def _make(self, positions: int) -> None:
        self._cos, self._sin = rope_angles(mx.arange(positions), self._head_dim, self._base)
        mx.async_eval(self._cos, self._sin)  # lazy ones would be worked out again at every call of a compiled function

    def at(self, offset: int, length: int) -> tuple[mx.array, mx.array]:
        """Cosines and sines of the positions from `offset` on, ``(length, head_dim / 2)``."""
        end = offset + length
        if end > self._cos.shape[0]:  # past the window: it is the caller who knows why
            self._make(2 * end)
        return self._cos[offset:end], self._sin[offset:end]


class CpuAttention(Attention):
    """Attention with one fused normalization and rotation, and a softmax whose exponential is fast."""

    _angles: Angles

    def prepare(self, qk: mx.array, offset: int | mx.array) -> mx.array:
        if isinstance(offset, mx.array) or qk.dtype != mx.float32:  # an array is one position a row
            return super().prepare(qk, offset)
        cos, sin = self._angles.at(offset, qk.shape[2])
        if not self.normalize_qk:
            return ops.rotate(qk, cos, sin)
        weight = mx.where(self._is_query, self.q_norm.weight, self.k_norm.weight)
        return ops.normalize_and_rotate(qk, weight, cos, sin, self.norm_eps)

    def attend(self, q: mx.array, k: Any, v: Any, mask: Mask, cache: Any) -> mx.array:
        if self.training or isinstance(mask, mx.array) or hasattr(cache, "bits") or q.dtype != mx.float32:
            return super().attend(q, k, v, mask, cache)
        return ops.attention(q, k, v, self.scale, causal=mask == "causal")


class CpuFeedForward(FeedForward):
    """SwiGLU with a fast exponential."""

    def activate(self, y: mx.array) -> mx.array:
        plain = self.training or not self.glu or y.dtype != mx.float32
        return super().activate(y) if plain else ops.swiglu(y)
