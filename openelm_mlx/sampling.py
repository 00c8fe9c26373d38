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
            ``(1, V)``. Both are lazy.
        """
        how = self._how
        logits = logits.astype(mx.float32)
        if how.repetition_penalty != 1.0 and self._recent.size:
            logits = penalize(logits, self._recent, how.repetition_penalty)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        if how.temperature == 0:
            token = logprobs.argmax(-1)
        else:
            self._key, key = mx.random.split(self._key)
            token = mx.random.categorical(heat(keep_likely(logprobs, how), how.temperature), key=key)
        if how.repetition_penalty != 1.0:
            self._recent = mx.concatenate([self._recent, token.astype(mx.int32)])[-how.repetition_context_size :]
        return token, logprobs


def heat(logprobs: mx.array, temperature: float) -> mx.array:
    """Divide ``(1, V)`` log-probabilities by a temperature above 0."""
    # Within float32, where an extreme temperature would make every token -inf, or NaN.
    return logprobs / min(max(temperature, _TINY), 1 / _TINY)


def penalize(logits: mx.array, recent: mx.array, penalty: float) -> mx.array:
    """Make the tokens `recent`, ``(N,)``, less likely in ``(1, V)`` logits; each once, however often it occurs."""
    seen = logits[:, recent]
    logits = logits + 0  # the caller's array stays as it is
    logits[:, recent] = mx.where(seen > 0, seen / penalty, seen * penalty)
    return logits


def keep_likely(logprobs: mx.array, how: Sampling) -> mx.array:
    """Apply top-k, top-p and min-p to ``(1, V)`` log-probabilities; what they remove becomes -inf."""
    vocab = logprobs.shape[-1]
    if 0 < how.top_k < vocab:
        kth = mx.topk(logprobs, how.top_k, axis=-1).min(-1, keepdims=True)
        logprobs = mx.where(logprobs < kth, -mx.inf, logprobs)
    if how.top_p < 1:
        order = mx.argsort(-logprobs, axis=-1)
        probs = mx.softmax(mx.take_along_axis(logprobs, order, axis=-1), axis=-1)
        before = mx.cumsum(probs, axis=-1, inclusive=False)  # mass of the more likely tokens
        drop = mx.put_along_axis(mx.zeros(logprobs.shape, mx.bool_), order, before >= max(how.top_p, _TINY), axis=-1)
        logprobs = mx.where(drop, -mx.inf, logprobs)
    if how.min_p > 0:
        least = logprobs.max(-1, keepdims=True) + mx.log(mx.array(how.min_p))
        logprobs = mx.where(logprobs < least, -mx.inf, logprobs)
    return logprobs
