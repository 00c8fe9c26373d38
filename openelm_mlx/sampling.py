"""Choosing the next token from logits.

Filters are applied in llama.cpp's order, on the distribution before temperature: top-k, top-p, min-p, then temperature.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from openelm_mlx.errors import OpenELMError

_TINY = 1e-30
"""As good as zero, and still a float32 (as its inverse is)."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen. The defaults are greedy decoding.

    Raises:
        OpenELMError: a value is out of its range.
    """

    temperature: float = 0.0
    """0 takes the most likely token; above, logits are divided by it and sampled."""
    top_k: int = 0
    """Only the k most likely tokens, and those exactly as likely as the last of them; 0 is off."""
    top_p: float = 1.0
    """Only the smallest set of tokens whose probabilities reach p (the token that crosses p included); 1 is off."""
    min_p: float = 0.0
    """Only tokens at least this fraction as likely as the most likely one; 0 is off."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of recent tokens, multiplies the negative ones (Keskar et al. 2019); 1 is off."""
    repetition_context_size: int = 64
    """How many of the last tokens, prompt included, are recent."""
    seed: int | None = None
    """Makes sampling repeatable; None takes a new one each time."""

    def __post_init__(self) -> None:
        self._require("temperature", "a number, 0 or more", lambda x: 0 <= x < math.inf)
        self._require("top_k", "a whole number, 0 (off) or more", lambda x: x >= 0, int)
        self._require("top_p", "above 0 and at most 1 (off)", lambda x: 0 < x <= 1)
        self._require("min_p", "from 0 (off) to 1", lambda x: 0 <= x <= 1)
        self._require("repetition_penalty", "from 0.001 to 1000 (1 is off)", lambda x: 0.001 <= x <= 1000)
        self._require("repetition_context_size", "a whole number, 1 or more", lambda x: x >= 1, int)
        if self.seed is not None:
            self._require("seed", "a whole number from 0 to 2**64 - 1", lambda x: 0 <= x < 2**64, int)

    def _require(
        self, name: str, range_: str, ok: Callable[[Any], bool], kind: type | tuple[type, ...] = (int, float)
    ) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, kind) or not ok(value):
            raise OpenELMError(f"{name} must be {range_}, not {value!r}")


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
        drop = mx.put_along_axis(mx.zeros_like(logprobs, mx.bool_), order, before >= max(how.top_p, _TINY), axis=-1)
        logprobs = mx.where(drop, -mx.inf, logprobs)
    if how.min_p > 0:
        least = logprobs.max(-1, keepdims=True) + mx.log(mx.array(how.min_p))
        logprobs = mx.where(logprobs < least, -mx.inf, logprobs)
    return logprobs
