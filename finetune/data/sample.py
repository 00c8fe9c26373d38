"""A random part of texts that are too many to be kept, read once."""

from __future__ import annotations

import heapq
import random


class Sample:
    """As many of the texts added as fit into `largest` bytes of UTF-8, chosen at random; all of them if they do.

    Args:
        largest: bytes.
        seed: decides which; with the same texts and seed the sample is the same.
    """

    def __init__(self, largest: int, seed: int) -> None:
        self.nbytes = 0
        """Of the texts in the sample."""
        self.added = 0
        """Bytes of all texts added."""
        self._largest = largest
        self._random = random.Random(seed)
        self._count = 0
        self._below = 1.0
        self._kept: list[tuple[float, int, int, str]] = []

    def add(self, text: str) -> None:
        """Let a text take part. Each draws a number, and those with the smallest ones are kept."""
        size = len(text.encode())
        drawn = self._random.random()
        self.added += size
        self._count += 1
        if drawn >= self._below:
            return
        heapq.heappush(self._kept, (-drawn, self._count, size, text))
        self.nbytes += size
        while self.nbytes > self._largest:
            largest, _, size, _ = heapq.heappop(self._kept)
            self._below = -largest  # or a small text could come in where a larger one did not fit
            self.nbytes -= size

    @property
    def texts(self) -> list[str]:
        """The sample, in the order in which it was added."""
        return [text for _, _, _, text in sorted(self._kept, key=lambda kept: kept[1])]
