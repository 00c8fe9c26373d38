"""Modified Kneser-Ney against values by hand, and against the formula written out word for word."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
import pytest

from openelm_mlx.benchmarks.kneser_ney import KneserNey, discounts
from openelm_mlx.errors import OpenELMError

BOS, EOS, A, B, C = range(5)
TINY = [[BOS, A, B, EOS], [BOS, A, A, EOS]]


def after(model: KneserNey, context: Sequence[int], vocab: int) -> list[float]:
    """The probability of each id after a document's first ids."""
    return [math.exp(model.log_probabilities([*context, w])[-1]) for w in range(vocab)]


def test_single_tokens_by_hand() -> None:
    # Six tokens predicted: A three times, EOS twice, B once. Discounts 1.5, 1 and 0.5; 3 of 6 go to all five ids alike.
    model = KneserNey(TINY, order=1, vocab_size=5)
    shared = 3 / 6 / 5
    expected = [shared, (2 - 1) / 6 + shared, (3 - 1.5) / 6 + shared, (1 - 0.5) / 6 + shared, shared]
    assert after(model, [BOS], 5) == pytest.approx(expected)
    assert after(model, [BOS, A, B], 5) == pytest.approx(expected)


def test_pairs_by_hand() -> None:
    # Before A come BOS and A, before B comes A, before EOS come B and A: counts 2, 1 and 2, of 5 in all.
    model = KneserNey(TINY, order=2, vocab_size=5)
    shared = (1 + 0.5 + 1) / 5 / 5
    single = {EOS: (2 - 1) / 5 + shared, A: (2 - 1) / 5 + shared, B: (1 - 0.5) / 5 + shared, BOS: shared, C: shared}
    # After A come B, A and EOS, once each: half a count off each, 1.5 of 3 handed on. After BOS comes A, twice.
    after_a = {w: (0.5 / 3 if w in (A, B, EOS) else 0) + 0.5 * p for w, p in single.items()}
    after_bos = {w: (0.5 if w == A else 0) + 0.5 * p for w, p in single.items()}
    assert after(model, [BOS, A], 5) == pytest.approx([after_a[w] for w in range(5)])
    assert after(model, [BOS], 5) == pytest.approx([after_bos[w] for w in range(5)])
    assert after(model, [BOS, C], 5) == pytest.approx([single[w] for w in range(5)])  # C was never seen
    whole = model.log_probabilities([BOS, A, B, EOS])
    assert whole[:2] == pytest.approx(np.log([after_bos[A], after_a[B]]))


def test_discounts_by_hand() -> None:
    counts = np.array([1] * 8 + [2] * 4 + [3] * 2 + [4] + [9])
    assert discounts(counts) == pytest.approx((1 - 2 * 0.5 * 4 / 8, 2 - 3 * 0.5 * 2 / 4, 3 - 4 * 0.5 * 1 / 2))


@pytest.mark.parametrize("counts", [[1, 2, 3], [1, 1, 1, 1, 2, 3, 3, 3, 3, 3, 3, 4], []])
def test_discounts_where_they_cannot_be_estimated(counts: list[int]) -> None:
    assert discounts(np.array(counts)) == (0.5, 1.0, 1.5)


class Plain:
    """The formula over tuples and dictionaries."""

    def __init__(self, documents: list[list[int]], order: int, vocab: int) -> None:
        self.order, self.vocab = order, vocab
        self.counts: list[Counter[tuple[int, ...]]] = [Counter() for _ in range(order + 1)]
        left: list[dict[tuple[int, ...], set[int]]] = [defaultdict(set) for _ in range(order + 1)]
        for ids in documents:
            for n in range(1, order + 1):
                for end in range(max(n, 2), len(ids) + 1):
                    gram = tuple(ids[end - n : end])
                    if n == order or end == n:
                        self.counts[n][gram] += 1
                    else:
                        left[n][gram].add(ids[end - n - 1])
        for n in range(1, order):
            self.counts[n].update({gram: len(before) for gram, before in left[n].items()})
        self.cut = [discounts(np.array(list(c.values()), dtype=np.int64)) for c in self.counts]

    def p(self, w: int, context: tuple[int, ...]) -> float:
        return self._p(w, context[max(0, len(context) - self.order + 1) :])

    def _p(self, w: int, context: tuple[int, ...]) -> float:
        n = len(context) + 1
        shorter = self._p(w, context[1:]) if context else 1 / self.vocab
        following = {gram: c for gram, c in self.counts[n].items() if gram[:-1] == context}
        if not following:
            return shorter
        total = sum(following.values())
        taken = {gram: self.cut[n][min(c, 3) - 1] for gram, c in following.items()}
        gram = (*context, w)
        return (following.get(gram, 0) - taken.get(gram, 0)) / total + sum(taken.values()) / total * shorter


def corpus(seed: int, documents: int, vocab: int) -> list[list[int]]:
    """Documents of a few ids, frequent and rare ones, in habitual orders."""
    rng = random.Random(seed)
    made = []
    for _ in range(documents):
        ids = [BOS]
        while len(ids) < 2 or rng.random() > 0.1:
            ids.append(2 + min(int(rng.expovariate(4 / vocab)) + ids[-1] % 2, vocab - 4))
        made.append([*ids, EOS])
    return made


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_equals_the_formula(order: int) -> None:
    train, other = corpus(order, 80, 40), corpus(order + 100, 8, 40)
    model, plain = KneserNey(train, order=order, vocab_size=40), Plain(train, order, 40)
    assert order == 1 or plain.cut[2] != (0.5, 1.0, 1.5)  # but estimated from these counts
    for ids in (*other, [BOS, 39, 38, 39, EOS]):
        expected = [math.log(plain.p(w, tuple(ids[:at]))) for at, w in enumerate(ids) if at]
        assert model.log_probabilities(ids) == pytest.approx(expected)


@pytest.mark.parametrize("order", [1, 3, 5])
def test_probabilities_sum_to_one(order: int) -> None:
    documents = corpus(order, 40, 9)
    model = KneserNey(documents, order=order, vocab_size=11)
    contexts = [[BOS], *(ids[:at] for ids in documents[:3] for at in range(1, len(ids))), [BOS, 10, 9], [BOS, 3, 10, 2]]
    for context in contexts:
        probabilities = after(model, context, 11)
        assert sum(probabilities) == pytest.approx(1)
        assert min(probabilities) > 0


def test_grams_longer_than_the_documents() -> None:
    short = [[BOS, A, EOS], [BOS, B, EOS]]
    assert KneserNey(short, order=9, vocab_size=5).log_probabilities([BOS, A, EOS]) == pytest.approx(
        KneserNey(short, order=3, vocab_size=5).log_probabilities([BOS, A, EOS])
    )


def test_documents_do_not_follow_each_other() -> None:
    ab, ba = ([[BOS, *ids, EOS] for ids in order] for order in ([[A, B], [C, C]], [[C, C], [A, B]]))
    one, other = (KneserNey(documents, order=3, vocab_size=5) for documents in (ab, ba))
    for w in range(5):
        assert one.log_probabilities([BOS, A, w]) == pytest.approx(other.log_probabilities([BOS, A, w]))


@pytest.mark.parametrize(
    ("documents", "order", "message"),
    [
        ([], 2, "needs documents, and there are none"),
        ([[BOS]], 2, "a document needs a token after its first one"),
        ([[BOS, 7]], 2, "an id is outside the vocabulary of 5"),
        ([[BOS, A]], 0, "order must be a whole number, 1 or more, not 0"),
    ],
)
def test_refusals(documents: list[list[int]], order: int, message: str) -> None:
    with pytest.raises(OpenELMError, match=message):
        KneserNey(documents, order=order, vocab_size=5)
