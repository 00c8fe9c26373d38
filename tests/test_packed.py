"""Several documents in a row: each sees itself alone, and begins at position 0."""

from __future__ import annotations

import mlx.core as mx
import pytest

from openelm_mlx.cpu.layers import speed_up
from openelm_mlx.model import OpenELM
from openelm_mlx.packed import PackedRows, row_starts
from tests.support.models import golden_model

DOCUMENTS = ((3, 5, 1), (6,), (2, 7))
LENGTH = 12


def ids(*shape: int) -> mx.array:
    return mx.random.randint(3, 250, shape, key=mx.random.key(3))


def logits(model: OpenELM, tokens: mx.array, documents: tuple[tuple[int, ...], ...] = DOCUMENTS) -> mx.array:
    rows = PackedRows.of(documents, tokens.shape[1])
    return model(tokens, cache=[rows] * len(model.layers))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("case", ["tiny-tied", "tiny-no-qk-norm"])
def test_logits_are_those_of_each_document_alone(case: str, fast: bool, training: bool) -> None:
    model = golden_model(case)
    if fast:
        speed_up(model)
    model.train(training)
    tokens = ids(3, LENGTH)
    packed = logits(model, tokens)
    for row, lengths in enumerate(DOCUMENTS):
        start = 0
        for n in lengths:
            part = slice(start, start + n)
            assert mx.allclose(packed[row, part], model(tokens[row : row + 1, part])[0], atol=1e-4)
            start += n


def test_a_change_in_one_document_changes_no_other_one() -> None:
    model = golden_model("tiny-tied")
    tokens = ids(3, LENGTH)
    changed = mx.array(tokens)
    changed[0, 1] = 300
    before, after = logits(model, tokens), logits(model, changed)
    assert not mx.array_equal(before[0, 1:3], after[0, 1:3])
    assert mx.array_equal(before[0, 3:9], after[0, 3:9])
    assert mx.array_equal(before[1:], after[1:])


def test_padding_changes_nothing() -> None:
    model = golden_model("tiny-tied")
    tokens = ids(1, LENGTH)
    padded = mx.pad(tokens, [(0, 0), (0, 8)], constant_values=mx.array(9))
    short, long = (logits(model, t, ((3, 5),)) for t in (tokens, padded))
    assert mx.allclose(short[:, :8], long[:, :8], atol=1e-5)


def test_starts_and_positions() -> None:
    assert row_starts([(2, 3), (4,), ()], 6) == [[0, 0, 2, 2, 2, 2], [0] * 6, [0] * 6]
    rows = PackedRows.of([(2, 3), (4,)], 6)
    assert rows.offset.tolist() == [[0, 1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]]


def test_the_mask_by_hand() -> None:
    mask = PackedRows.of([(2, 1)], 4).make_mask(4)
    assert mask.shape == (1, 1, 4, 4)
    assert mask[0, 0].astype(mx.int32).tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
