"""The loss of a batch: next-token cross entropy, with logits for trained positions only and a few rows at a time.

A logit is 32,000 times as much as a token: all of a batch's at once, and their gradients, would be most of a step's
memory. Here a piece's logits, its loss and the gradient of the loss are computed together and only the gradient of
the hidden states is kept, as in Liger Kernel (Hsu et al. 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from openelm_mlx import device
from openelm_mlx.cpu import backprop, ops
from openelm_mlx.finetune.data.types import Batch, Ids
from openelm_mlx.layer_paths import EMBEDDING, HEAD
from openelm_mlx.model import OpenELM
from openelm_mlx.packed import PackedRows
from openelm_mlx.trees import trainable

LOGITS = 1 << 24
"""Logits made at a time: 512 rows of a vocabulary of 32,000, 64 MB."""

_SHAPES = 128
"""Trained positions are filled up to a multiple of this: a compiled step is traced anew for each shape."""


@dataclass(frozen=True)
class Arrays:
    """A :class:`Batch` on the device."""

    ids: mx.array
    """Inputs ``(B, L)``."""
    places: mx.array
    """``(N,)``: rows of ``(B * L, D)`` hidden states that are trained."""
    targets: mx.array
    """``(N,)``."""
    weights: mx.array
    """``(N,)``: 1, and 0 for places that only fill up."""
    starts: mx.array | None
    """For packed rows ``(B, L)``: where each token's document begins."""
    documents: Sequence[Sequence[int]] | None
    """The same as lengths, for a CPU; not known inside a compiled step."""

    @classmethod
    def of(cls, batch: Batch, *, fill_up: bool) -> Arrays:
        """`fill_up` makes the number of places one of few."""
        places, targets, weights = _filled_up(batch) if fill_up else _as_it_is(batch)
        rows = PackedRows.of(batch.documents, batch.ids.shape[1]) if batch.packed else None
        return cls(
            ids=mx.array(batch.ids),
            places=mx.array(places),
            targets=mx.array(targets),
            weights=mx.array(weights),
            starts=None if rows is None else rows.starts,
            documents=batch.documents,
        )


_Picked = tuple[Ids, Ids, npt.NDArray[np.float32]]


def _as_it_is(batch: Batch) -> _Picked:
    return batch.places, batch.targets, np.ones(len(batch.places), np.float32)


def _filled_up(batch: Batch) -> _Picked:
    """With places of no weight; as many as there are, in their order, or fewer than that."""
    n, most = len(batch.places), batch.ids.size
    count = min(n + -n % _SHAPES, most)
    places, targets, weights = np.zeros(count, np.int32), np.zeros(count, np.int32), np.zeros(count, np.float32)
    where: Ids = np.arange(n, dtype=np.int32)
    if count == most:  # so many are taken for all: see `hidden_states`
        places, where = np.arange(most, dtype=np.int32), batch.places
    places[where], targets[where], weights[where] = batch.places, batch.targets, 1
    return places, targets, weights


def batch_loss(model: OpenELM, batch: Arrays, z_loss: float = 0.0) -> mx.array:
    """Sum of the cross entropies of a batch's targets, in nats; float32.

    Has gradients by the model's trainable parameters, of the first order. `z_loss` times the square of each logarithmic
    sum of exponentials is added, as in CoreNet's cross_entropy.py and PaLM (Chowdhery et al. 2022, section 5).
    """
    hidden = hidden_states(model, batch)
    return summed_loss(model, hidden, batch.targets, batch.weights, z_loss)


def cpu_loss_and_gradients(
    model: OpenELM, batch: Arrays, seed: int, *, recompute: bool, z_loss: float = 0.0
) -> tuple[mx.array, dict[str, mx.array]]:
    """:func:`batch_loss` and its gradients by parameter name, for a float32 model on a CPU: several times as fast."""
    assert batch.documents is not None

    def head(hidden: mx.array) -> tuple[mx.array, mx.array, dict[str, mx.array]]:
        picked = batch.places.shape[0] != hidden.shape[0]
        chosen = hidden[batch.places] if picked else hidden
        loss, change, own = loss_and_gradients(model, chosen, batch.targets, batch.weights, z_loss, after_each=mx.eval)
        if picked:
            change = mx.zeros_like(hidden).at[batch.places].add(change)
        return loss, change, {f"{head_of(model)[0]}.{name}": g for name, g in own.items()}

    return backprop.loss_and_gradients(
        model, batch.ids, batch.documents, batch.starts, head, seed=seed, recompute=recompute
    )


def loss_alone(model: OpenELM, batch: Arrays, *, on_cpu: bool) -> float:
    """:func:`batch_loss` without gradients; `on_cpu` for a float32 model on a CPU."""
    if on_cpu:
        assert batch.documents is not None
        hidden = backprop.hidden_states(model, batch.ids, batch.documents, batch.starts)[batch.places]
    else:
        hidden = hidden_states(model, batch)

    def settle(loss: mx.array, *_: Any) -> None:
        mx.eval(loss)

    return float(loss_and_gradients(model, hidden, batch.targets, batch.weights, after_each=settle)[0])


def hidden_states(model: OpenELM, batch: Arrays) -> mx.array:
    """``(N, D)``: what the head makes the trained positions' logits of."""
    rows: Any = None
    if batch.starts is not None:
        rows = [PackedRows(batch.starts)] * len(model.layers)
    hidden = model.transformer(batch.ids, rows)
    hidden = hidden.reshape(-1, hidden.shape[-1])
    # Where everything is trained, gathering would only copy, and its gradient is slow.
    return hidden if batch.places.shape[0] == hidden.shape[0] else hidden[batch.places]


def summed_loss(
    model: OpenELM, hidden: mx.array, targets: mx.array, weights: mx.array, z_loss: float = 0.0
) -> mx.array:
    """The weighted sum of the cross entropies of hidden states ``(N, D)``; has gradients of the first order."""
    total, by_hidden, by_trained = loss_and_gradients(model, mx.stop_gradient(hidden), targets, weights, z_loss)
    total = _with_gradient(total, hidden, by_hidden)
    own = trainable(head_of(model)[1])
    for name, gradient in by_trained.items():
        total = _with_gradient(total, own[name], gradient)
    return total


def head_of(model: OpenELM) -> tuple[str, nn.Module]:
    """The output head's name and itself: with tied embeddings the embedding."""
    if model.config.share_input_output_layers:
        return EMBEDDING, model.transformer.token_embeddings
    return HEAD, model.lm_head


def loss_and_gradients(
    model: OpenELM,
    hidden: mx.array,
    targets: mx.array,
    weights: mx.array,
    z_loss: float = 0.0,
    *,
    after_each: Callable[..., None] = lambda *_: None,
) -> tuple[mx.array, mx.array, dict[str, mx.array]]:
    """The weighted sum of the cross entropies, its gradient by the hidden states, and those by the head's parameters.

    Args:
        model: its head is used.
        hidden: ``(N, D)``.
        targets: ``(N,)``.
        weights: ``(N,)``.
        z_loss: see :func:`batch_loss`.
        after_each: called with what a piece gave. Evaluating that bounds memory: MLX makes room ahead of computing.
    """
    head = head_of(model)[1]
    step = max(1, LOGITS // model.config.vocab_size)
    losses, by_hidden = [], []
    by_trained: dict[str, mx.array] = {}
    for i in range(0, hidden.shape[0], step):
        part = slice(i, i + step)
        loss, gradient, more = _piece(model, head, hidden[part], targets[part], weights[part], z_loss)
        losses.append(loss)
        by_hidden.append(gradient)
        by_trained = {name: by_trained[name] + g if name in by_trained else g for name, g in more.items()}
        after_each(loss, gradient, by_trained)
    return mx.stack(losses).sum(), mx.concatenate(by_hidden), by_trained


def _piece(
    model: OpenELM, head: nn.Module, hidden: mx.array, targets: mx.array, weights: mx.array, z_loss: float
) -> tuple[mx.array, mx.array, dict[str, mx.array]]:
    """The same for a few rows."""
    own = trainable(head)

    def logits(hidden: mx.array, *parameters: mx.array) -> mx.array:
        head.load_weights(list(zip(own, parameters, strict=True)), strict=False)
        return model.head(hidden)

    inputs = [hidden, *map(mx.stop_gradient, own.values())]
    try:
        loss, changes = _softmax_gradient(logits(*inputs), targets, weights, z_loss)
        # The product is linear: what it gives is not needed for its gradient, and is not computed again.
        gradients = mx.vjp(logits, inputs, [changes])[1]
    finally:
        head.load_weights(list(own.items()), strict=False)
    return mx.stop_gradient(loss), gradients[0], dict(zip(own, gradients[1:], strict=True))


def _softmax_gradient(
    logits: mx.array, targets: mx.array, weights: mx.array, z_loss: float
) -> tuple[mx.array, mx.array]:
    """The weighted losses' sum, and its gradient by the logits in their dtype."""
    exp_of_difference = ops.exp_of_difference if device.backend() == "cpu" else _exp_of_difference
    exact = logits.astype(mx.float32)
    most = exact.max(-1, keepdims=True)
    exponentials = exp_of_difference(exact, most)
    total = exponentials.sum(-1, keepdims=True)
    picked = mx.take_along_axis(exact, targets[:, None], axis=-1)
    z = mx.log(total) + most
    loss = (weights[:, None] * (z - picked + z_loss * mx.square(z))).sum()
    gradient = exponentials * (weights[:, None] * (1 + 2 * z_loss * z) / total)
    rows = mx.arange(targets.shape[0])
    return loss, gradient.at[rows, targets].subtract(weights).astype(logits.dtype)


@mx.compile
def _exp_of_difference(x: mx.array, most: mx.array) -> mx.array:
    return mx.exp(x - most)


def _with_gradient(value: mx.array, x: mx.array, gradient: mx.array) -> mx.array:
    """`value`, whose gradient by `x` shall be `gradient`: what is added is 0.

    A function with a gradient of its own cannot be compiled (MLX 0.32).
    """
    return value + (mx.stop_gradient(gradient) * (x - mx.stop_gradient(x))).astype(mx.float32).sum()
