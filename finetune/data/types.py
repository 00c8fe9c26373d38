"""What passes between reading, encoding, batching and training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Encoded:
    """One example as tokens."""

    ids: Ids
    """``(n,)``, n at least 2; BOS and EOS included, cut to the longest allowed."""
    learn: Flags
    """``(n,)``: whether the token is a target, predicted from those before it. Never the first."""
    where: str
    """File and line, for messages: ``my.jsonl:17``."""

    @property
    def rows(self) -> tuple[Encoded, ...]:
        """What lies in rows of its own: itself."""
        return (self,)


@dataclass(frozen=True)
class Pair:
    """Two responses to one prompt as tokens, of which one is preferred. It is counted and told apart as one example."""

    chosen: Encoded
    rejected: Encoded
    where: str
    """File and line."""
    prompt_lost: int = 0
    """Tokens that the prompt lost at its start."""

    @property
    def rows(self) -> tuple[Encoded, ...]:
        """Both, which lie in rows one after the other."""
        return self.chosen, self.rejected

    @property
    def ids(self) -> Ids:
        """Those of both."""
        return np.concatenate([self.chosen.ids, self.rejected.ids])

    @property
    def learn(self) -> Flags:
        """The same for which tokens are of a response."""
        return np.concatenate([self.chosen.learn, self.rejected.learn])

    @property
    def same(self) -> bool:
        """Whether nothing tells the two apart."""
        return np.array_equal(self.chosen.ids, self.rejected.ids)


Item = Encoded | Pair
"""An example: what an epoch has once."""


@dataclass(frozen=True)
class Batch:
    """Rows of tokens for one forward pass, and which of their outputs are trained.

    An example of n ids gives n - 1 inputs (all but its last id): output t predicts id t + 1.
    """

    ids: Ids
    """Inputs ``(B, L)``; what is not filled is 0, at the end of rows."""
    documents: tuple[tuple[int, ...], ...]
    """Of each row, the numbers of inputs of the examples in it, in order."""
    places: Ids
    """``(N,)``: the outputs that are trained, as ``row * L + position``, ascending."""
    targets: Ids
    """``(N,)``: the id that each should predict."""
    where: tuple[str, ...]
    """Of each example in it, file and line."""

    @property
    def packed(self) -> bool:
        """Whether some row holds several examples, which must not see each other."""
        return any(len(row) > 1 for row in self.documents)

    @property
    def tokens(self) -> int:
        """Inputs that are no padding."""
        return sum(sum(row) for row in self.documents)


class Stream(Protocol):
    """Endless batches with a position: a run that was stopped goes on where it was."""

    @property
    def position(self) -> dict[str, Any]:
        """Plain values from which :meth:`seek` comes back to the next batch."""

    @property
    def most_rows(self) -> int:
        """Rows that no batch has more of."""

    @property
    def longest_row(self) -> int:
        """Length that no batch's rows exceed, padding included."""

    def batches_in(self, epochs: float) -> int:
        """How many batches so many times through the data make."""

    def seek(self, position: dict[str, Any]) -> None:
        """Go on from a position that was told earlier."""

    def __iter__(self) -> Iterator[Batch]: ...

    def __next__(self) -> Batch: ...
