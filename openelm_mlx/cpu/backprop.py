"""A model's forward and backward pass on MLX's CPU backend, written out.

MLX differentiates by tracing, and under a trace it fuses nothing: half of a training step would go into element-wise
operations. Here the chain rule is applied layer by layer; only projections, which are matrix products, are left to
`mx.vjp`. Gradients equal MLX's own, which the tests hold them to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from openelm_mlx.adapters.layers import LoRALinear
from openelm_mlx.cpu import kernels, ops, segments
from openelm_mlx.cpu.segments import Segment
from openelm_mlx.layer_paths import EMBEDDING
from openelm_mlx.model import Attention, DecoderLayer, FeedForward, OpenELM, add_projection, rope_angles
from openelm_mlx.trees import nested, trainable

Gradients = dict[str, mx.array]
Head = Callable[[mx.array], tuple[mx.array, mx.array, Gradients]]
"""From hidden states ``(B * L, D)`` to the loss, its gradient by them, and those by the head's own parameters."""


@dataclass(frozen=True)
class _Heads:
    """Queries, scaled, keys and values of a layer: ``(B, heads, L, head_dim)``."""

    q: mx.array
    k: mx.array
    v: mx.array


@dataclass(frozen=True)
class _Kept:
    """What a layer's backward pass needs of its forward pass."""

    x: mx.array
    qkv: mx.array
    heads: _Heads
    weights: Any
    attended: mx.array
    middle: mx.array
    inside: list[mx.array]
    activated: mx.array


@dataclass(frozen=True)
class _Rows:
    """Where the documents of a batch lie, and the angles of their positions."""

    segments: Sequence[Segment]
    cos: mx.array
    sin: mx.array

    @classmethod
    def of(cls, model: OpenELM, length: int, documents: Sequence[Sequence[int]], starts: Any) -> _Rows:
        places = mx.arange(length, dtype=mx.int32)
        positions = places[None] if starts is None else places - starts
        config = model.config
        angles = rope_angles(positions[:, None], config.head_dim, float(config.rope_freq_constant))
        return cls(segments=segments.segments(documents), cos=angles[0], sin=angles[1])


def loss_and_gradients(
    model: OpenELM,
    ids: mx.array,
    documents: Sequence[Sequence[int]],
    starts: mx.array | None,
    head: Head,
    *,
    seed: int,
    recompute: bool = False,
) -> tuple[mx.array, Gradients]:
    """The loss of a batch and its gradients by the model's trainable parameters, by name; evaluated.

    Args:
        model: float32, in training mode.
        ids: inputs ``(B, L)``.
        documents: of each row, the lengths of the documents in it.
        starts: for packed rows ``(B, L)``, where each token's document begins.
        head: the loss.
        seed: of dropout.
        recompute: keep the layers' inputs alone and compute the rest again: less memory, more time.
    """
    return _Pass(model, ids, _Rows.of(model, ids.shape[1], documents, starts), seed, recompute).run(head)


def hidden_states(
    model: OpenELM, ids: mx.array, documents: Sequence[Sequence[int]], starts: mx.array | None
) -> mx.array:
    """What the output head gets, ``(B * L, D)``, for a model in evaluation mode; see :func:`loss_and_gradients`."""
    return _Pass(model, ids, _Rows.of(model, ids.shape[1], documents, starts), 0, False).hidden_states()


class _Pass:
    def __init__(self, model: OpenELM, ids: mx.array, rows: _Rows, seed: int, recompute: bool) -> None:
        self.model = model
        self.ids = ids
        self.rows = rows
        self.seed = seed
        self.recompute = recompute
        self.gradients: Gradients = {}
        self.first = _first_trained(model)
        """The first layer that a gradient has to reach."""

    def run(self, head: Head) -> tuple[mx.array, Gradients]:
        decoder = self.model.transformer
        kept: list[Any] = []
        x = self._embed()
        for n, layer in enumerate(decoder.layers):
            following, state = self._layer(n, layer, x)
            if n >= self.first:
                kept.append(x if self.recompute else state)
            x = following
            mx.async_eval(x)
        normed = _normed(decoder.norm, x)
        loss, change, own = head(normed.reshape(-1, normed.shape[-1]))
        self._add(own)
        change = self._through_norm("transformer.norm", decoder.norm, x, change.reshape(x.shape))
        del x, normed, following, state
        mx.eval(loss, change, self.gradients)
        for n in range(len(decoder.layers) - 1, self.first - 1, -1):
            state = kept.pop()
            if self.recompute:
                state = self._layer(n, decoder.layers[n], state)[1]
            change = self._layer_back(n, decoder.layers[n], state, change)
            mx.eval(change, self.gradients)
        if self.first == 0 and trainable(decoder.token_embeddings):
            self._pull(EMBEDDING, decoder.token_embeddings, lambda: self._embed(), [], [change])
        mx.eval(self.gradients)
        return loss, self.gradients

    def hidden_states(self) -> mx.array:
        decoder = self.model.transformer
        x = self._embed()
        for n, layer in enumerate(decoder.layers):
            x = self._layer(n, layer, x)[0]
            mx.async_eval(x)
        return _normed(decoder.norm, x).reshape(-1, x.shape[-1])

    def _embed(self) -> mx.array:
        self._draw(-1, 0)
        return self.model.transformer.token_embeddings(self.ids)

    # Layers

    def _layer(self, n: int, layer: DecoderLayer, x: mx.array) -> tuple[mx.array, _Kept]:
        attn, ffn = layer.attn, layer.ffn
        attn_in = _normed(layer.attn_norm, x)
        self._draw(n, 0)
        qkv = attn.qkv_proj(attn_in)
        heads = _Heads(*_prepare(*self._head_inputs(attn, qkv), **_sizes(attn)))
        out, weights = segments.attention(heads.q, heads.k, heads.v, self.rows.segments)
        attended = out.swapaxes(1, 2).reshape(*x.shape[:2], -1)
        self._draw(n, 1)
        middle = add_projection(x, attn.out_proj, attended)
        ffn_in = _normed(layer.ffn_norm, middle)
        self._draw(n, 2)
        inside = _inside(ffn, ffn_in)
        activated = _activated(ffn, inside)
        self._draw(n, 3)
        following = add_projection(middle, ffn.proj_2, activated)
        return following, _Kept(x, qkv, heads, weights, attended, middle, inside, activated)

    def _layer_back(self, n: int, layer: DecoderLayer, kept: _Kept, change: mx.array) -> mx.array:
        """The gradient by the layer's input, from that by its output; as far as something trained is before it."""
        attn, ffn, path = layer.attn, layer.ffn, f"transformer.layers.{n}"
        # The norms are not kept: they take a hundredth of the time, and would take a tenth of the memory.
        attn_in, ffn_in = _normed(layer.attn_norm, kept.x), _normed(layer.ffn_norm, kept.middle)
        self._draw(n, 3)
        (inner,) = self._pull(f"{path}.ffn.proj_2", ffn.proj_2, ffn.proj_2, [kept.activated], [change])
        inside = _activation_gradients(ffn, kept.inside, inner)
        self._draw(n, 2)
        (inner,) = self._pull(f"{path}.ffn.proj_1", ffn.proj_1, partial(_inside, ffn), [ffn_in], inside)
        change = change + self._through_norm(f"{path}.ffn_norm", layer.ffn_norm, kept.middle, inner)
        self._draw(n, 1)
        (inner,) = self._pull(f"{path}.attn.out_proj", attn.out_proj, attn.out_proj, [kept.attended], [change])
        inner = self._through_attention(path, attn, kept, inner)
        on = n > self.first or trainable(layer.attn_norm) or trainable(self.model.transformer.token_embeddings)
        self._draw(n, 0)
        if not on:  # nothing before this projection is trained
            self._pull(f"{path}.attn.qkv_proj", attn.qkv_proj, lambda: attn.qkv_proj(attn_in), [], [inner])
            return change
        (inner,) = self._pull(f"{path}.attn.qkv_proj", attn.qkv_proj, attn.qkv_proj, [attn_in], [inner])
        return change + self._through_norm(f"{path}.attn_norm", layer.attn_norm, kept.x, inner)

    def _through_attention(self, path: str, attn: Attention, kept: _Kept, change: mx.array) -> mx.array:
        B, L, _ = change.shape
        heads = kept.heads
        shape = (B, L, attn.num_heads, attn.head_dim)
        output, change = (x.reshape(shape).swapaxes(1, 2) for x in (kept.attended, change))
        found = segments.attention_gradients(
            heads.q, heads.k, heads.v, self.rows.segments, kept.weights, output, change
        )
        inputs = self._head_inputs(attn, kept.qkv)
        if not (attn.normalize_qk and (trainable(attn.q_norm) or trainable(attn.k_norm))):
            return _prepare_gradient(*inputs, *found, **_sizes(attn))
        by_qkv, by_q, by_k = _prepare_gradients(*inputs, *found, **_sizes(attn))
        self._add({f"{path}.attn.q_norm.weight": by_q} if trainable(attn.q_norm) else {})
        self._add({f"{path}.attn.k_norm.weight": by_k} if trainable(attn.k_norm) else {})
        return by_qkv

    def _head_inputs(self, attn: Attention, qkv: mx.array) -> list[Any]:
        weights = [attn.q_norm.weight, attn.k_norm.weight] if attn.normalize_qk else [None, None]
        return [qkv, *weights, self.rows.cos, self.rows.sin]

    # The chain rule

    def _pull(
        self,
        path: str,
        module: nn.Module,
        function: Callable[..., Any],
        inputs: Sequence[mx.array],
        changes: Sequence[mx.array],
    ) -> list[mx.array]:
        """Gradients by the inputs of a module's function; those by its trained parameters are added."""
        own = trainable(module)
        if not (own or inputs):
            return []

        def run(*arrays: mx.array) -> Any:
            module.update(nested(dict(zip(own, arrays[len(inputs) :], strict=True))))
            return function(*arrays[: len(inputs)])

        try:
            found = mx.vjp(run, [*inputs, *own.values()], list(changes))[1]
        finally:
            module.update(nested(own))
        self._add({f"{path}.{name}": g for name, g in zip(own, found[len(inputs) :], strict=True)})
        return found[: len(inputs)]

    def _through_norm(self, path: str, norm: nn.Module, x: mx.array, change: mx.array) -> mx.array:
        if trainable(norm):
            self._add({f"{path}.weight": kernels.norm_weight_gradient(x, norm.eps, change)})
        return kernels.norm_gradient(x, norm.weight, norm.eps, change)

    def _add(self, more: Gradients) -> None:
        for name, gradient in more.items():
            self.gradients[name] = self.gradients[name] + gradient if name in self.gradients else gradient

    def _draw(self, layer: int, place: int) -> None:
        """Let what follows draw the same random numbers in the backward pass as in the forward pass."""
        mx.random.seed((self.seed + 4 * (layer + 1) + place) & 0xFFFFFFFF)


def _normed(norm: nn.Module, x: mx.array) -> mx.array:
    return kernels.norm(x, norm.weight, norm.eps)


def _first_trained(model: OpenELM) -> int:
    if trainable(model.transformer.token_embeddings):
        return 0
    layers = model.layers
    return next((n for n, layer in enumerate(layers) if trainable(layer)), len(layers))


def _inside(ffn: FeedForward, x: mx.array) -> list[mx.array]:
    """What the first projection gives; gate and up each an array of its own: halves of rows are slow to work on."""
    projection = ffn.proj_1
    base = projection.base if isinstance(projection, LoRALinear) else projection
    if not ffn.glu:
        return [projection(x)]
    if type(base) is not nn.Linear or "bias" in base:
        both: Any = mx.split(projection(x), 2, axis=-1)
        return list(both)
    width = base.weight.shape[0] // 2
    parts = (slice(0, width), slice(width, 2 * width))
    plain = [x @ base.weight[part].T for part in parts]
    if base is projection:
        return plain
    return [projection.add_update(y, x, part) for y, part in zip(plain, parts, strict=True)]


def _activated(ffn: FeedForward, inside: list[mx.array]) -> mx.array:
    return kernels.gated(inside[0], inside[1]) if ffn.glu else _silu(inside[0])


def _activation_gradients(ffn: FeedForward, inside: list[mx.array], change: mx.array) -> Sequence[mx.array]:
    return kernels.gated_gradients(inside[0], inside[1], change) if ffn.glu else [_silu_gradient(inside[0], change)]


def _sizes(attn: Attention) -> dict[str, Any]:
    return {"H": attn.num_heads, "H_kv": attn.num_kv_heads, "eps": attn.norm_eps, "scale": attn.scale}


def _heads(
    qkv: mx.array,
    q_weight: Any,
    k_weight: Any,
    cos: mx.array,
    sin: mx.array,
    H: int,
    H_kv: int,
    eps: float,
    scale: float,
) -> list[mx.array]:
    """Queries (scaled), keys and values of ``(B, L, (H + 2 H_kv) head_dim)``, as `Attention.prepare` makes them."""
    B, L, _ = qkv.shape
    x = qkv.reshape(B, L, H + 2 * H_kv, -1).swapaxes(1, 2)
    q, k, v = mx.split(x, [H, H + H_kv], axis=1)
    if q_weight is None:
        return [ops.rotate(q, cos, sin) * scale, ops.rotate(k, cos, sin), v]
    q, k = (ops.normalize_and_rotate(a, w, cos, sin, eps) for a, w in ((q, q_weight), (k, k_weight)))
    return [q * scale, k, v]


_prepare = mx.compile(_heads)


@mx.compile
def _prepare_gradient(qkv: mx.array, *rest: Any, **sizes: Any) -> mx.array:
    others, changes = rest[:4], rest[4:]
    return mx.vjp(lambda qkv: _heads(qkv, *others, **sizes), [qkv], list(changes))[1][0]


@mx.compile
def _prepare_gradients(qkv: mx.array, q_weight: mx.array, k_weight: mx.array, *rest: Any, **sizes: Any) -> Any:
    angles, changes = rest[:2], rest[2:]
    inputs = [qkv, q_weight, k_weight]
    return mx.vjp(lambda *arrays: _heads(*arrays, *angles, **sizes), inputs, list(changes))[1]


@mx.compile
def _silu(x: mx.array) -> mx.array:
    return nn.silu(x)


@mx.compile
def _silu_gradient(x: mx.array, change: mx.array) -> mx.array:
    return mx.vjp(nn.silu, [x], [change])[1][0]
