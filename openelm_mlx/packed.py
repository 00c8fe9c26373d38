"""Several documents in one row, each seeing itself alone: for training, where padding would be wasted work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx


class PackedRows:
    """Takes the place of a layer's cache in a forward pass over packed rows; one serves all layers.

    ``model(ids, cache=[PackedRows(starts)] * len(model.layers))``: attention stays inside each document, and positions
    begin at 0 in each. What follows a row's last document belongs to it, and should not be looked at.

    Args:
        starts: ``(B, L)`` int32: where in its row the document that each token belongs to begins.
    """

    def __init__(self, starts: mx.array) -> None:
        self.starts = starts
        self.offset = mx.arange(starts.shape[1], dtype=mx.int32) - starts
        """``(B, L)``: each token's position in its document. Two-dimensional, unlike other caches' offsets."""

    @classmethod
    def of(cls, documents: Sequence[Sequence[int]], length: int) -> PackedRows:
        """From the lengths of each row's documents, and the rows' common length."""
        return cls(mx.array(row_starts(documents, length), dtype=mx.int32))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Nothing is kept."""
        return keys, values

    def make_mask(self, length: int, **_: Any) -> mx.array:
        """``(B, 1, L, L)``: whether a token (third axis) sees another (fourth)."""
        places = mx.arange(length, dtype=mx.int32)
        return (places[None, :] <= places[:, None]) & (places >= self.starts[:, None, :, None])


def row_starts(documents: Sequence[Sequence[int]], length: int) -> list[list[int]]:
    """Where the document of each place begins, ``(B, length)``; places after the last one count as its own."""
    rows = []
    for lengths in documents:
        row: list[int] = []
        for n in lengths:
            row += [len(row)] * n
        last = row[-1] if row else 0
        rows.append(row + [last] * (length - len(row)))
    return rows
