"""The loss of a batch and its gradients, with logits for trained positions only and a few rows at a time.

A logit is 32,000 times as much as a token: all of a batch's at once, and their gradients, would be most of a step's
memory. Here a piece's logits, its loss and the gradient of the loss are computed together and only the gradient of
the hidden states is kept, as in Liger Kernel (Hsu et al. 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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
    reference: mx.array | None = None
    """``(B,)``: log-probabilities of the rows' responses before training, for preferences."""

    @classmethod
    def of(cls, batch: Batch, *, fill_up: bool, reference: mx.array | None = None) -> Arrays:
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
            reference=reference,
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


After = Callable[..., None]
"""Called with what a piece gave. Evaluating that bounds memory: MLX makes room ahead of computing."""


def _nothing(*_: Any) -> None: ...


Gradients = dict[str, mx.array]


class Objective(Protocol):
    """What is made small in training: a sum over the things that count, targets or pairs."""

    @property
    def unit(self) -> str:
        """What is counted, as metrics name it: tokens or pairs."""

    @property
    def figures(self) -> tuple[str, ...]:
        """Names of the sums that it gives: ``loss`` is the first."""

    def count(self, batch: Batch) -> int:
        """How many things of a batch count; all count alike."""

    def arrays(self, batch: Batch, *, fill_up: bool) -> Arrays:
        """The batch on the device."""

    def sums(self, model: OpenELM, hidden: mx.array, batch: Arrays, after_each: After) -> mx.array:
        """The sums of a batch, by `hidden` ``(N, D)``, which the head makes the trained positions' logits of."""

    def sums_and_gradients(
        self, model: OpenELM, hidden: mx.array, batch: Arrays, after_each: After
    ) -> tuple[mx.array, mx.array, Gradients]:
        """The same, and the gradients of the first of them: by `hidden`, and by the head's own parameters."""


@dataclass(frozen=True)
class NextToken:
    """Cross entropies of the targets, in nats.

    `z_loss` times the square of each logarithmic sum of exponentials is added, as in CoreNet's cross_entropy.py and
    PaLM (Chowdhery et al. 2022, section 5).
    """

    z_loss: float = 0.0
    unit = "tokens"
    figures = ("loss",)

    def count(self, batch: Batch) -> int:
        return len(batch.targets)

    def arrays(self, batch: Batch, *, fill_up: bool) -> Arrays:
        return Arrays.of(batch, fill_up=fill_up)

    def sums(self, model: OpenELM, hidden: mx.array, batch: Arrays, after_each: After) -> mx.array:
        each = token_losses(model, hidden, batch.targets, after_each=after_each)
        return (batch.weights * each).sum()[None]

    def sums_and_gradients(
        self, model: OpenELM, hidden: mx.array, batch: Arrays, after_each: After
    ) -> tuple[mx.array, mx.array, Gradients]:
        loss, by_hidden, by_head = loss_and_gradients(
            model, hidden, batch.targets, batch.weights, self.z_loss, after_each=after_each
        )
        return loss[None], by_hidden, by_head


def batch_loss(model: OpenELM, batch: Arrays, objective: Objective) -> tuple[mx.array, mx.array]:
    """The objective's loss, float32, with gradients of the first order by the trainable parameters; and its sums."""
    hidden = hidden_states(model, batch)
    sums, by_hidden, by_head = objective.sums_and_gradients(model, mx.stop_gradient(hidden), batch, _nothing)
    return _with_gradients(model, sums[0], hidden, by_hidden, by_head), sums


def cpu_sums_and_gradients(
    model: OpenELM, batch: Arrays, objective: Objective, seed: int, *, recompute: bool
) -> tuple[mx.array, Gradients]:
    """The objective's sums, and its gradients by parameter name, for a float32 model on a CPU: several times as fast
    as :func:`batch_loss`."""
    assert batch.documents is not None

    def head(hidden: mx.array) -> tuple[mx.array, mx.array, Gradients]:
        picked = batch.places.shape[0] != hidden.shape[0]
        chosen = hidden[batch.places] if picked else hidden
        sums, change, own = objective.sums_and_gradients(model, chosen, batch, mx.eval)
        if picked:
            change = mx.zeros_like(hidden).at[batch.places].add(change)
        return sums, change, {f"{head_of(model)[0]}.{name}": g for name, g in own.items()}

    return backprop.loss_and_gradients(
        model, batch.ids, batch.documents, batch.starts, head, seed=seed, recompute=recompute
    )


def sums_alone(model: OpenELM, batch: Arrays, objective: Objective, *, on_cpu: bool) -> mx.array:
    """The objective's sums without gradients; `on_cpu` for a float32 model on a CPU."""
    return objective.sums(model, evaluated_states(model, batch, on_cpu=on_cpu), batch, mx.eval)


def evaluated_states(model: OpenELM, batch: Arrays, *, on_cpu: bool) -> mx.array:
    """:func:`hidden_states` for a model in evaluation mode; `on_cpu` for a float32 model on a CPU."""
    if not on_cpu:
        return hidden_states(model, batch)
    assert batch.documents is not None
    return backprop.hidden_states(model, batch.ids, batch.documents, batch.starts)[batch.places]


def hidden_states(model: OpenELM, batch: Arrays) -> mx.array:
    """``(N, D)``: what the head makes the trained positions' logits of."""
    rows: Any = None
    if batch.starts is not None:
        rows = [PackedRows(batch.starts)] * len(model.layers)
    hidden = model.transformer(batch.ids, rows)
    hidden = hidden.reshape(-1, hidden.shape[-1])
    # Where everything is trained, gathering would only copy, and its gradient is slow.
    return hidden if batch.places.shape[0] == hidden.shape[0] else hidden[batch.places]


def _with_gradients(
    model: OpenELM, loss: mx.array, hidden: mx.array, by_hidden: mx.array, by_head: Gradients
) -> mx.array:
    """`loss` with these gradients by hidden states and by the head's parameters."""
    loss = _with_gradient(loss, hidden, by_hidden)
    own = trainable(head_of(model)[1])
    for name, gradient in by_head.items():
        loss = _with_gradient(loss, own[name], gradient)
    return loss


def head_of(model: OpenELM) -> tuple[str, nn.Module]:
    """The output head's name and itself: with tied embeddings the embedding."""
    if model.config.share_input_output_layers:
        return EMBEDDING, model.transformer.token_embeddings
    return HEAD, model.lm_head


def token_losses(model: OpenELM, hidden: mx.array, targets: mx.array, *, after_each: After = _nothing) -> mx.array:
    """The cross entropy of each target, ``(N,)`` float32, of hidden states ``(N, D)``; without gradients."""
    found = []
    for part in _pieces(model, hidden):
        exact = model.head(hidden[part]).astype(mx.float32)
        z = _exponentials(exact)[2]
        found.append((z - mx.take_along_axis(exact, targets[part][:, None], axis=-1))[:, 0])
        after_each(found[-1])
    return mx.stop_gradient(mx.concatenate(found))


def loss_and_gradients(
    model: OpenELM,
    hidden: mx.array,
    targets: mx.array,
    weights: mx.array,
    z_loss: float = 0.0,
    *,
    after_each: After = _nothing,
) -> tuple[mx.array, mx.array, Gradients]:
    """The weighted sum of the cross entropies, its gradient by the hidden states, and those by the head's parameters.

    Args:
        model: its head is used.
        hidden: ``(N, D)``.
        targets: ``(N,)``.
        weights: ``(N,)``.
        z_loss: see :class:`NextToken`.
        after_each: see :data:`After`.
    """
    head = head_of(model)[1]
    losses, by_hidden = [], []
    by_trained: Gradients = {}
    for part in _pieces(model, hidden):
        loss, gradient, more = _piece(model, head, hidden[part], targets[part], weights[part], z_loss)
        losses.append(loss)
        by_hidden.append(gradient)
        by_trained = {name: by_trained[name] + g if name in by_trained else g for name, g in more.items()}
        after_each(loss, gradient, by_trained)
    return mx.stack(losses).sum(), mx.concatenate(by_hidden), by_trained


def _pieces(model: OpenELM, hidden: mx.array) -> Iterator[slice]:
    """Rows whose logits are made at a time."""
    step = max(1, LOGITS // model.config.vocab_size)
    return (slice(i, i + step) for i in range(0, hidden.shape[0], step))


def _piece(
    model: OpenELM, head: nn.Module, hidden: mx.array, targets: mx.array, weights: mx.array, z_loss: float
) -> tuple[mx.array, mx.array, Gradients]:
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
    exact = logits.astype(mx.float32)
    exponentials, total, z = _exponentials(exact)
    picked = mx.take_along_axis(exact, targets[:, None], axis=-1)
    loss = (weights[:, None] * (z - picked + z_loss * mx.square(z))).sum()
    gradient = exponentials * (weights[:, None] * (1 + 2 * z_loss * z) / total)
    rows = mx.arange(targets.shape[0])
    return loss, gradient.at[rows, targets].subtract(weights).astype(logits.dtype)


def _exponentials(logits: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """The exponentials of each row, scaled so that none overflows; their sum; and the logarithm of the true sum."""
    exp_of_difference = ops.exp_of_difference if device.backend() == "cpu" else _exp_of_difference
    most = logits.max(-1, keepdims=True)
    exponentials = exp_of_difference(logits, most)
    total = exponentials.sum(-1, keepdims=True)
    return exponentials, total, mx.log(total) + most


@mx.compile
def _exp_of_difference(x: mx.array, most: mx.array) -> mx.array:
    return mx.exp(x - most)


def _with_gradient(value: mx.array, x: mx.array, gradient: mx.array) -> mx.array:
    """`value`, whose gradient by `x` shall be `gradient`: what is added is 0.

    A function with a gradient of its own cannot be compiled (MLX 0.32).
    """
    return value + (mx.stop_gradient(gradient) * (x - mx.stop_gradient(x))).astype(mx.float32).sum()
