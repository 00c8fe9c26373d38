"""An interpolated n-gram model with modified Kneser-Ney smoothing, over token ids.

Source: Chen and Goodman, An Empirical Study of Smoothing Techniques for Language Modeling (1998), section 4.1.6. The
probability of a token w after the words h is

    p(w | h) = max(c(h w) - D(c(h w)), 0) / c(h .) + gamma(h) p(w | h without its first)

where c counts how often h w is there in the longest order, and in shorter ones how many different tokens come before
it. D takes three values, for counts of 1, of 2 and of more; gamma(h) hands on what they took. Below single tokens is
the uniform distribution.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from openelm_mlx.errors import OpenELMError
from openelm_mlx.settings import whole_number

_Ints = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]

_FALLBACK = (0.5, 1.0, 1.5)
"""Discounts where there are too few counts to estimate them; KenLM's."""


@dataclass(frozen=True)
class _Order:
    """The grams of one length, each known by its place among them; that of grams without any tokens is 0."""

    keys: _Ints
    """Ascending, for each gram: the gram without its last token, times the vocabulary's size, plus that token."""
    discounted: _Floats
    """For each gram, its probability after what comes before its last token, without the shorter ones' part."""
    handed_on: _Floats
    """For each gram of one token less, the weight of the shorter ones' probability after it."""


class KneserNey:
    """A model of documents, each of which begins with a token that is context and never predicted.

    Args:
        documents: ids of each, at least 2.
        order: tokens in the longest grams.
        vocab_size: ids that there are; the probabilities after any context are of all of them and sum to one.

    Raises:
        OpenELMError: there are no documents, or an id is outside the vocabulary.
    """

    def __init__(self, documents: Iterable[Sequence[int]], *, order: int, vocab_size: int) -> None:
        whole_number("order", order, 1)
        self._vocab = vocab_size
        tokens, places = self._joined(documents)
        grams = [np.zeros(len(tokens), dtype=np.int64)]
        keys = [np.zeros(1, dtype=np.int64)]
        for length in range(1, min(order, int(places.max()) + 1) + 1):
            there = places >= length - 1
            found, of_place = np.unique(self._keys(grams[-1], tokens)[there], return_inverse=True)
            keys.append(found)
            grams.append(np.full(len(tokens), -1))
            grams[-1][there] = of_place
        self._orders = [
            self._estimated(keys[length], self._counts(grams, places, length), len(keys[length - 1]))
            for length in range(1, len(keys))
        ]

    def log_probabilities(self, document: Sequence[int]) -> _Floats:
        """Of a document's ids but the first, the natural logarithm of each one's probability after those before it."""
        tokens, places = self._joined([document])
        found = np.full(len(tokens), 1.0 / self._vocab)
        grams = np.zeros(len(tokens), dtype=np.int64)
        for length, order in enumerate(self._orders, 1):
            before = np.where(places >= length - 1, np.concatenate([[0], grams[:-1]]), -1)
            grams = _places(order.keys, np.where(before >= 0, self._keys(grams, tokens), -1))
            known = before >= 0
            own = np.where(grams >= 0, order.discounted[grams], 0.0)
            found = np.where(known, own + order.handed_on[before] * found, found)
        return np.log(found[1:])

    def _joined(self, documents: Iterable[Sequence[int]]) -> tuple[_Ints, _Ints]:
        """All ids, and of each its place in its document."""
        arrays = [np.asarray(document, dtype=np.int64) for document in documents]
        if not arrays:
            raise OpenELMError("an n-gram model needs documents, and there are none")
        if min(map(len, arrays)) < 2:
            raise OpenELMError("a document needs a token after its first one")
        tokens = np.concatenate(arrays)
        if tokens.min() < 0 or tokens.max() >= self._vocab:
            raise OpenELMError(f"an id is outside the vocabulary of {self._vocab:,}")
        return tokens, np.concatenate([np.arange(len(a)) for a in arrays])

    def _keys(self, grams: _Ints, tokens: _Ints) -> _Ints:
        """Of each place, the key of the gram that ends there and has one token more than those of `grams`."""
        before = np.concatenate([[0], grams[:-1]])
        return np.where(before >= 0, before * self._vocab + tokens, -1)

    @staticmethod
    def _counts(grams: list[_Ints], places: _Ints, length: int) -> _Ints:
        """Of each gram of `length` tokens: how often it is there; of shorter than the longest, after how many tokens.

        What a document begins with comes after nothing, and is counted as the longest are. A document's first token is
        never predicted, so it has no count by itself.
        """
        here = grams[length]
        of_each = np.bincount(here[(here >= 0) & (places >= 1)], minlength=here.max() + 1)
        if length + 1 == len(grams):
            return of_each
        longer = grams[length + 1]
        _, first = np.unique(longer, return_index=True)
        counts = np.bincount(here[first[longer[first] >= 0]], minlength=len(of_each))
        beginnings = here[(places == length - 1) & (places >= 1)]
        counts[beginnings] = of_each[beginnings]
        return counts

    def _estimated(self, keys: _Ints, counts: _Ints, of_shorter: int) -> _Order:
        context = keys // self._vocab
        amounts = np.array((0.0, *discounts(counts)))[np.minimum(counts, 3)]
        total = np.bincount(context, weights=counts, minlength=of_shorter)
        taken = np.bincount(context, weights=amounts, minlength=of_shorter)
        divisor = np.maximum(total, 1)
        return _Order(
            keys=keys,
            discounted=(counts - amounts) / divisor[context],
            handed_on=np.where(total > 0, taken / divisor, 1.0),  # nothing ever follows the end of a document
        )


def discounts(counts: npt.NDArray[np.int64]) -> tuple[float, float, float]:
    """What is taken off counts of 1, of 2 and of 3 and more (Chen and Goodman, equation 26)."""
    n1, n2, n3, n4 = (int((counts == n).sum()) for n in range(1, 5))
    if not (n1 and n2 and n3 and n4):
        return _FALLBACK
    y = n1 / (n1 + 2 * n2)
    found = (1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3)
    return found if all(0 < d <= n for n, d in enumerate(found, 1)) else _FALLBACK


def _places(keys: _Ints, wanted: _Ints) -> _Ints:
    """Where each wanted key is among `keys`, -1 where it is not."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, at, -1)
