"""The key-value cache of one layer.

Same interface as mlx-lm's caches (``offset``, ``update_and_fetch``, ``make_mask``, ``state``, ``trim``), which the
model accepts in its place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx

if TYPE_CHECKING:
    from openelm_mlx.model import OpenELM

Mask = mx.array | str | None


def causal_mask(length: int) -> Mask:
    """The mask of `length` new tokens behind any number of cached ones: one token may look at everything."""
    return "causal" if length > 1 else None


class KVCache:
    """Keys and values of one layer, grown `step` positions at a time.

    Arrays are ``(B, H_kv, capacity, head_dim)``; the first `offset` positions are filled.
    """

    step = 256

    def __init__(self) -> None:
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.offset = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append ``(B, H_kv, L, head_dim)`` keys and values; return all so far, ``(B, H_kv, offset, head_dim)``."""
        start, self.offset = self.offset, self.offset + keys.shape[2]
        self.keys = self._with_room(self.keys, keys, start)
        self.values = self._with_room(self.values, values, start)
        self.keys[..., start : self.offset, :] = keys
        self.values[..., start : self.offset, :] = values
        return self.keys[..., : self.offset, :], self.values[..., : self.offset, :]

    def _with_room(self, held: mx.array | None, new: mx.array, start: int) -> mx.array:
        if held is not None and held.shape[2] >= self.offset:
            return held
        B, H, _, D = new.shape
        capacity = -(-self.offset // self.step) * self.step
        if held is None:
            return mx.zeros((B, H, capacity, D), new.dtype)
        return mx.concatenate([held[..., :start, :], mx.zeros((B, H, capacity - start, D), new.dtype)], axis=2)

    def make_mask(self, length: int, return_array: bool = False, window_size: int | None = None) -> Mask:
        """The mask for `length` new tokens; ``(length, offset + length)`` booleans when asked for an array."""
        if window_size is None and not return_array:
            return causal_mask(length)
        rows = mx.arange(self.offset, self.offset + length)[:, None]
        columns = mx.arange(self.offset + length)[None]
        mask = columns <= rows
        return mask if window_size is None else mask & (columns > rows - window_size)

    def is_trimmable(self) -> bool:
        """Whether the last positions can be taken back."""
        return True

    def trim(self, n: int) -> int:
        """Forget the last `n` positions; the number really forgotten."""
        n = min(self.offset, n)
        self.offset -= n
        return n

    @property
    def state(self) -> tuple[mx.array | None, mx.array | None, int]:
        """What must be evaluated, or saved, for the cache to be up to date; mlx-lm's order."""
        return self.keys, self.values, self.offset

    @property
    def nbytes(self) -> int:
        """Bytes held, unfilled positions included."""
        return sum(a.nbytes for a in (self.keys, self.values) if a is not None)


def make_cache(model: OpenELM | Any) -> list[KVCache]:
    """One empty cache a layer."""
    return [KVCache() for _ in model.layers]
