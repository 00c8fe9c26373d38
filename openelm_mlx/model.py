"""The OpenELM decoder. The only place that knows the architecture.

Follows CoreNet's ``general_gpt.py`` (Apple): pre-norm decoder layers whose number of heads and feed-forward width
differ from layer to layer. Parameter names are Hugging Face's. `H` and `H_kv` are a layer's query and key-value heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from openelm_mlx.cache import Mask, causal_mask
from openelm_mlx.config import OpenELMConfig


@partial(mx.compile, shapeless=True)
def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """SiLU of `gate`, times `up`."""
    return nn.silu(gate) * up


@mx.compile
def scale_heads(x: mx.array, is_query: mx.array, q_weight: mx.array, k_weight: mx.array) -> mx.array:
    """Multiply query heads by one weight ``(head_dim,)`` and key heads by the other: one kernel for both.

    `x` is ``(B, H + H_kv, L, head_dim)``, `is_query` ``(H + H_kv, 1, 1)``.
    """
    return x * mx.where(is_query, q_weight, k_weight)


@mx.compile
def rotate(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """RoPE, half-split, of ``(B, any, L, head_dim)`` heads by angles ``(B, 1, L, head_dim / 2)``."""
    a, b = mx.split(x, 2, axis=-1)
    return mx.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)


def rope_angles(positions: mx.array, head_dim: int, base: float) -> tuple[mx.array, mx.array]:
    """RoPE's cosines and sines at any positions, float32 with an axis of ``head_dim / 2`` more.

    As CoreNet's RotaryEmbedding makes them.
    """
    frequencies = 1.0 / base ** (mx.arange(0, head_dim, 2).astype(mx.float32) / head_dim)
    angle = positions.astype(mx.float32)[..., None] * frequencies
    return mx.cos(angle), mx.sin(angle)


def add_projection(residual: mx.array, projection: nn.Module, x: mx.array) -> mx.array:
    """``residual + projection(x)``; in one kernel where the projection is a plain matrix."""
    if type(projection) is nn.Linear and "bias" not in projection:
        return mx.addmm(residual, x, projection.weight.T)
    return residual + projection(x)


class Attention(nn.Module):
    """Grouped-query attention with per-head RMSNorm on queries and keys, then RoPE.

    On a GPU a small model's decode step costs what its kernels cost to start: queries and keys are normalized, scaled
    and rotated together, and the residual is added by the last projection.
    """

    def __init__(self, config: OpenELMConfig, layer: int) -> None:
        super().__init__()
        head_dim = config.head_dim
        self.num_heads = config.num_query_heads[layer]
        self.num_kv_heads = config.num_kv_heads[layer]
        self.head_dim = head_dim
        self.scale = head_dim**-0.5
        self.rope_base = float(config.rope_freq_constant)
        self.norm_eps = config.rms_norm_eps
        self.qkv_proj = nn.Linear(config.model_dim, (self.num_heads + 2 * self.num_kv_heads) * head_dim, bias=False)
        self.out_proj = nn.Linear(self.num_heads * head_dim, config.model_dim, bias=False)
        self.normalize_qk = config.normalize_qk_projections
        if self.normalize_qk:
            self.q_norm = nn.RMSNorm(head_dim, config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(head_dim, config.rms_norm_eps)
            self._is_query = mx.arange(self.num_heads + self.num_kv_heads)[:, None, None] < self.num_heads

    def __call__(self, x: mx.array, residual: mx.array, mask: Mask = None, cache: Any = None) -> mx.array:
        B, L, _ = x.shape
        H, H_kv = self.num_heads, self.num_kv_heads
        qkv = self.qkv_proj(x).reshape(B, L, H + 2 * H_kv, self.head_dim).swapaxes(1, 2)  # (B, H + 2 H_kv, L, D)
        qk, v = mx.split(qkv, [H + H_kv], axis=1)
        q, k = mx.split(self.prepare(qk, 0 if cache is None else cache.offset), [H], axis=1)
        if cache is not None:
            k, v = cache.update_and_fetch(k, v)
        out = self.attend(q, k, v, mask, cache)
        return add_projection(residual, self.out_proj, out.swapaxes(1, 2).reshape(B, L, -1))

    def prepare(self, qk: mx.array, offset: int | mx.array) -> mx.array:
        """RMSNorm (where the model has it), then RoPE, of ``(B, H + H_kv, L, head_dim)`` queries and keys.

        RoPE is half-split, as in CoreNet's RotaryEmbedding, for positions from `offset` on, which may be one a row
        (batch caches), or the position of every token, ``(B, L)`` (packed rows).
        """
        if self.normalize_qk:
            normalized = mx.fast.rms_norm(qk, None, self.norm_eps)
            qk = scale_heads(normalized, self._is_query, self.q_norm.weight, self.k_norm.weight)
        if isinstance(offset, mx.array) and offset.ndim == 2:
            return rotate(qk, *rope_angles(offset[:, None], self.head_dim, self.rope_base))
        return mx.fast.rope(qk, self.head_dim, traditional=False, base=self.rope_base, scale=1.0, offset=offset)

    def attend(self, q: mx.array, k: Any, v: Any, mask: Mask, cache: Any) -> mx.array:
        """Attention of ``(B, H, L, head_dim)`` queries to ``(B, H_kv, S, head_dim)`` keys and values."""
        if hasattr(cache, "bits"):
            # Only mlx-lm's QuantizedKVCache has bits, so mlx-lm is loaded already: its kernel reads what it packed.
            from mlx_lm.models.base import quantized_scaled_dot_product_attention

            attend: Any = quantized_scaled_dot_product_attention  # its annotation leaves out the mask "causal"
            return attend(q, k, v, self.scale, mask, cache.group_size, cache.bits)
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=self.scale, mask=mask)


class FeedForward(nn.Module):
    """SwiGLU with both input projections in one matrix, or a plain two-layer network."""

    def __init__(self, config: OpenELMConfig, layer: int) -> None:
        super().__init__()
        width = config.ffn_dims[layer]
        self.glu = config.ffn_with_glu
        self.proj_1 = nn.Linear(config.model_dim, 2 * width if self.glu else width, bias=False)
        self.proj_2 = nn.Linear(width, config.model_dim, bias=False)

    def __call__(self, x: mx.array, residual: mx.array) -> mx.array:
        return add_projection(residual, self.proj_2, self.activate(self.proj_1(x)))

    def activate(self, y: mx.array) -> mx.array:
        """What stands between the projections: ``(B, L, 2 width)`` to ``(B, L, width)``, or the width as it is."""
        return swiglu(*mx.split(y, 2, axis=-1)) if self.glu else nn.silu(y)


class DecoderLayer(nn.Module):
    """Attention and feed-forward network, each behind a norm and beside a residual."""

    def __init__(self, config: OpenELMConfig, layer: int) -> None:
        super().__init__()
        self.attn = Attention(config, layer)
        self.ffn = FeedForward(config, layer)
        self.ffn_norm = nn.RMSNorm(config.model_dim, config.rms_norm_eps)
        self.attn_norm = nn.RMSNorm(config.model_dim, config.rms_norm_eps)

    def __call__(self, x: mx.array, mask: Mask = None, cache: Any = None) -> mx.array:
        x = self.attn(self.attn_norm(x), x, mask, cache)
        return self.ffn(self.ffn_norm(x), x)


class Decoder(nn.Module):
    """Embedding, layers and the last norm: everything but the output head."""

    def __init__(self, config: OpenELMConfig) -> None:
        super().__init__()
        self.token_embeddings = nn.Embedding(config.vocab_size, config.model_dim)
        self.layers = [DecoderLayer(config, i) for i in range(config.num_transformer_layers)]
        self.norm = nn.RMSNorm(config.model_dim, config.rms_norm_eps)

    def __call__(self, ids: mx.array, cache: Sequence[Any] | None = None) -> mx.array:
        x = self.token_embeddings(ids)
        length = ids.shape[1]
        # Both arguments have to be named: some of mlx-lm's caches give them no default.
        mask = (
            causal_mask(length) if cache is None else cache[0].make_mask(length, return_array=False, window_size=None)
        )
        for i, layer in enumerate(self.layers):
            x = layer(x, mask, None if cache is None else cache[i])
        return self.norm(x)


class OpenELM(nn.Module):
    """The language model, with mlx-lm's protocol: ``model(ids, cache=...) -> logits`` and ``model.layers``."""

    model_type = "openelm"

    def __init__(self, config: OpenELMConfig) -> None:
        super().__init__()
        self.args = config
        self.transformer = Decoder(config)
        if not config.share_input_output_layers:
            self.lm_head = nn.Linear(config.model_dim, config.vocab_size, bias=False)

    def __call__(
        self, ids: mx.array, cache: Sequence[Any] | None = None, logits_to_keep: int | None = None
    ) -> mx.array:
        """Next-token logits.

        Args:
            ids: token ids, ``(B, L)``.
            cache: one cache a layer, from :func:`openelm_mlx.cache.make_cache` or mlx-lm; None to use none.
            logits_to_keep: only the last so many positions; None for all. Prefill needs one, and saves the head's
                matmul for the rest.

        Returns:
            ``(B, L or logits_to_keep, vocab_size)`` logits in the model's dtype.
        """
        x = self.transformer(ids, cache)
        if logits_to_keep is not None:
            x = x[:, max(x.shape[1] - logits_to_keep, 0) :]
        return self.head(x)

    def head(self, x: mx.array) -> mx.array:
        """Logits of hidden states ``(B, L, D)``."""
        if self.config.share_input_output_layers:
            return self.transformer.token_embeddings.as_linear(x)
        return self.lm_head(x)

    @property
    def config(self) -> OpenELMConfig:
        """What the model is made of."""
        return self.args

    @property
    def layers(self) -> list[DecoderLayer]:
        """The decoder layers (mlx-lm counts caches by them)."""
        return self.transformer.layers
