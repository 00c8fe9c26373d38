"""Choosing the next token from logits.

Filters are applied in llama.cpp's order, on the distribution before temperature: top-k, top-p, min-p, then temperature.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import mlx.core as mx

from openelm_mlx.settings import Sampling

_TINY = 1e-30
"""As good as zero, and still a float32 (as its inverse is)."""


class Sampler:
    """A :class:`Sampling` at work: keeps its own random key and the recent tokens, and no global state.

    Args:
        sampling: how to choose.
        prompt: the ids so far; the last ones count as recent.
    """

    def __init__(self, sampling: Sampling, prompt: Sequence[int] = ()) -> None:
        self._how = sampling
        seed = int.from_bytes(os.urandom(8), "little") if sampling.seed is None else sampling.seed
        self._key = mx.random.key(seed)
        self._recent = mx.array(list(prompt)[-sampling.repetition_context_size :], mx.int32)

    def __call__(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        """Choose from ``(1, V)`` logits.

        Returns:
            The token, ``(1,)``, and the log-probabilities it was chosen from before filters and temperature,
            ``(1, V)`` float32. Both are lazy, and the token needs no log-probabilities: whoever does not look at them
            does not pay for them.
        """
        how = self._how
        if how.repetition_penalty != 1.0 and self._recent.size:
            logits = penalize(logits.astype(mx.float32), self._recent, how.repetition_penalty)
        if how.temperature == 0:
            token = logits.argmax(-1)
        else:
            self._key, key = mx.random.split(self._key)
            likely = keep_likely(logits.astype(mx.float32), how)
            token = mx.random.categorical(heat(likely, how.temperature), key=key)
        if how.repetition_penalty != 1.0:
            self._recent = mx.concatenate([self._recent, token.astype(mx.int32)])[-how.repetition_context_size :]
        return token, log_softmax(logits.astype(mx.float32))


def log_softmax(logits: mx.array) -> mx.array:
    """Log-probabilities of ``(..., V)`` logits."""
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def heat(logits: mx.array, temperature: float) -> mx.array:
    """Divide ``(1, V)`` logits by a temperature above 0."""
    # The best becomes 0, and the temperature stays within float32: an extreme one would make every token -inf, or NaN.
    return (logits - logits.max(-1, keepdims=True)) / min(max(temperature, _TINY), 1 / _TINY)


def penalize(logits: mx.array, recent: mx.array, penalty: float) -> mx.array:
    """Make the tokens `recent`, ``(N,)``, less likely in ``(1, V)`` logits; each once, however often it occurs."""
    seen = logits[:, recent]
    logits = logits + 0  # the caller's array stays as it is
    logits[:, recent] = mx.where(seen > 0, seen / penalty, seen * penalty)
    return logits


def keep_likely(logits: mx.array, how: Sampling) -> mx.array:
    """Apply top-k, top-p and min-p to ``(1, V)`` float32 logits; what they remove becomes -inf."""
    vocab = logits.shape[-1]
    if 0 < how.top_k < vocab:
        kth = mx.topk(logits, how.top_k, axis=-1).min(-1, keepdims=True)
        logits = mx.where(logits < kth, -mx.inf, logits)
    if how.top_p < 1:
        order = mx.argsort(-logits, axis=-1)
        probs = mx.softmax(mx.take_along_axis(logits, order, axis=-1), axis=-1)
        before = mx.cumsum(probs, axis=-1, inclusive=False)  # mass of the more likely tokens
        drop = mx.put_along_axis(mx.zeros(logits.shape, mx.bool_), order, before >= max(how.top_p, _TINY), axis=-1)
        logits = mx.where(drop, -mx.inf, logits)
    if how.min_p > 0:
        least = logits.max(-1, keepdims=True) + mx.log(mx.array(how.min_p))
        logits = mx.where(logits < least, -mx.inf, logits)
    return logits
