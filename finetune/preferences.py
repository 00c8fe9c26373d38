"""Direct preference optimization: which of two responses a model should find likelier than it did before.

Rafailov et al. 2023 (arXiv 2305.18290). The hinge loss, on the same margin, is that of SLiC (Zhao et al. 2023), as in
TRL.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import mlx.core as mx
import numpy as np

from openelm_mlx.finetune.data.types import Batch, Ids
from openelm_mlx.finetune.losses import After, Arrays, Gradients, loss_and_gradients, token_losses
from openelm_mlx.model import OpenELM

FIGURES = ("loss", "rewards_chosen", "rewards_rejected", "margin", "accuracy", "logps_chosen", "logps_rejected")

KEY_BYTES = 16


def pair_losses(logps: mx.array, reference: mx.array, *, kind: str, beta: float) -> tuple[mx.array, mx.array]:
    """The sums of :data:`FIGURES` over pairs, and the gradient of the first of them by `logps`.

    Args:
        logps: ``(2 P,)``: log-probabilities of responses, the chosen one of each pair and then its rejected one.
        reference: the same by the model before training.
        kind: sigmoid, ``-log sigmoid(margin)``, or hinge, ``max(0, 1 - margin)``.
        beta: a reward is beta times the difference to the reference; the margin is the difference of a pair's rewards.

    Returns:
        ``(7,)`` and ``(2 P,)``, float32.
    """
    rewards = (beta * (logps - reference)).reshape(-1, 2)
    chosen, rejected = rewards[:, 0], rewards[:, 1]
    margin = chosen - rejected
    if kind == "hinge":
        losses, slope = mx.maximum(1 - margin, 0), mx.where(margin < 1, -1.0, 0.0)
    else:
        losses, slope = mx.logaddexp(0, -margin), -mx.sigmoid(-margin)
    likelihoods = logps.reshape(-1, 2)
    right = (margin > 0).astype(mx.float32)
    each = (losses, chosen, rejected, margin, right, likelihoods[:, 0], likelihoods[:, 1])
    return mx.stack([x.sum() for x in each]), (beta * mx.stack([slope, -slope], axis=1)).reshape(-1)


def response_logps(model: OpenELM, hidden: mx.array, batch: Arrays, after_each: After) -> mx.array:
    """The log-probability of each row's response, the sum over its tokens and the one that ends it: ``(B,)`` float32.

    `hidden` is ``(N, D)``, of the trained positions. Has no gradients.
    """
    each = token_losses(model, hidden, batch.targets, after_each=after_each)
    return mx.zeros(batch.ids.shape[0]).at[_rows(batch)].subtract(batch.weights * each)


def _rows(batch: Arrays) -> mx.array:
    """The row that each trained position is in, ``(N,)``."""
    return batch.places // batch.ids.shape[1]


def row_keys(batch: Batch) -> list[bytes]:
    """What tells each row's tokens, and which of them are learned, from others', whatever batch they are in."""
    length = batch.ids.shape[1]
    ends = np.searchsorted(batch.places, np.arange(1, len(batch.ids)) * length)
    learned = zip(np.split(batch.places % length, ends), np.split(batch.targets, ends), strict=True)
    return [
        _key(batch.ids[n, : sum(batch.documents[n])], places, targets) for n, (places, targets) in enumerate(learned)
    ]


def _key(*arrays: Ids) -> bytes:
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for array in arrays:
        digest.update(len(array).to_bytes(8, "little") + array.astype("<i4").tobytes())
    return digest.digest()


class Preferences:
    """The DPO loss of a batch's pairs, whose rows are chosen, rejected, chosen, rejected, ...

    Args:
        kind: sigmoid or hinge.
        beta: see :func:`pair_losses`.
        reference: log-probabilities of the responses before training, by :func:`row_keys`.
    """

    unit = "pairs"
    figures = FIGURES

    def __init__(self, kind: str, beta: float, reference: Mapping[bytes, float]) -> None:
        self._kind = kind
        self._beta = beta
        self._reference = reference

    def count(self, batch: Batch) -> int:
        return len(batch.ids) // 2

    def arrays(self, batch: Batch, *, fill_up: bool) -> Arrays:
        known = np.array([self._reference[key] for key in row_keys(batch)], np.float32)
        return Arrays.of(batch, fill_up=fill_up, reference=mx.array(known))

    def sums(self, model: OpenELM, hidden: mx.array, batch: Arrays, after_each: After) -> mx.array:
        return self._losses(response_logps(model, hidden, batch, after_each), batch)[0]

    def sums_and_gradients(
        self, model: OpenELM, hidden: mx.array, batch: Arrays, after_each: After
    ) -> tuple[mx.array, mx.array, Gradients]:
        sums, slopes = self._losses(response_logps(model, hidden, batch, after_each), batch)
        # A row's cross entropies are all multiplied by the same: the loss depends on their sum alone.
        weights = -slopes[_rows(batch)] * batch.weights
        _, by_hidden, by_head = loss_and_gradients(model, hidden, batch.targets, weights, after_each=after_each)
        return sums, by_hidden, by_head

    def _losses(self, logps: mx.array, batch: Arrays) -> tuple[mx.array, mx.array]:
        assert batch.reference is not None
        return pair_losses(logps, batch.reference, kind=self._kind, beta=self._beta)
