"""The loss in pieces: MLX's own cross entropy over all logits, and its gradients."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest

from openelm_mlx.finetune import losses
from openelm_mlx.finetune.losses import Arrays, NextToken, batch_loss, loss_and_gradients
from openelm_mlx.model import OpenELM
from openelm_mlx.trees import Tensors, flat, trainable
from tests.finetune.made import alone, batch_of, distance, examples, model_of, stock_gradients

CLOSE = 2e-5
LENGTHS = [33, 7, 2, 20]


def gradients(model: OpenELM, batch: Arrays, *, compiled: bool = False) -> tuple[float, Tensors]:
    both = nn.value_and_grad(model, batch_loss)

    def run(*arrays: mx.array) -> tuple[mx.array, Tensors]:
        ids, places, targets, weights, *starts = arrays
        batch = Arrays(ids, places, targets, weights, starts[0] if starts else None, None)
        (loss, _), tree = both(model, batch, NextToken())
        return loss, flat(tree)

    given = [batch.ids, batch.places, batch.targets, batch.weights]
    loss, found = (mx.compile(run) if compiled else run)(*given, *([] if batch.starts is None else [batch.starts]))
    mx.eval(loss, found)
    return float(loss), found


@pytest.mark.parametrize("on_cpu", [False, True])
@pytest.mark.parametrize("case", ["tiny-tied", "tiny-untied"])
def test_z_loss_is_that_of_all_logits(case: str, on_cpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "LOGITS", 512 * 11)
    model, batch, weight = model_of(case, "full"), Arrays.of(alone(examples(LENGTHS)), fill_up=False), 0.01

    def direct(model: OpenELM) -> mx.array:
        logits = model(batch.ids).reshape(-1, model.config.vocab_size)[batch.places]
        z = mx.logsumexp(logits, axis=-1)
        return (nn.losses.cross_entropy(logits, batch.targets) + weight * z * z).sum()

    expected, tree = nn.value_and_grad(model, direct)(model)
    if on_cpu:
        loss, found = losses.cpu_sums_and_gradients(model, batch, NextToken(weight), 0, recompute=False)
    else:
        (loss, _), parts = nn.value_and_grad(model, batch_loss)(model, batch, NextToken(weight))
        found = flat(parts)
    assert float(loss) == pytest.approx(float(expected), rel=CLOSE)
    assert distance(found, flat(tree)) < CLOSE


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("case", "method", "targets"),
    [
        ("tiny-tied", "full", ()),
        ("tiny-untied", "full", ()),
        ("tiny-tied", "lora", ("qkv_proj", "token_embeddings")),
        ("tiny-untied", "dora", ("qkv_proj", "lm_head")),
        ("tiny-no-glu", "lora", ("proj_1",)),
    ],
)
def test_loss_and_gradients_are_those_of_mlx(
    case: str, method: str, targets: tuple[str, ...], compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "LOGITS", 512 * 11)  # several pieces, the last one smaller
    made = examples(LENGTHS, learned=0.7)
    loss, expected = stock_gradients(model_of(case, method, targets=targets), made)
    for batch in (alone(made), batch_of([made[:2], made[2:]])):
        arrays = Arrays.of(batch, fill_up=compiled)
        found, ours = gradients(model_of(case, method, targets=targets), arrays, compiled=compiled)
        assert found == pytest.approx(loss, rel=1e-5)
        assert distance(ours, expected) < CLOSE


def test_the_size_of_the_pieces_changes_nothing_but_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("tiny-untied")
    batch = Arrays.of(alone(examples(LENGTHS)), fill_up=False)
    whole = gradients(model, batch)
    monkeypatch.setattr(losses, "LOGITS", 1)  # one row at a time
    single = gradients(model, batch)
    assert single[0] == pytest.approx(whole[0], rel=1e-6)
    assert distance(single[1], whole[1]) < CLOSE


def test_weights_count_each_target() -> None:
    model = model_of("tiny-untied", "full")
    hidden = mx.random.normal((5, model.config.model_dim), key=mx.random.key(0))
    targets = mx.array([3, 0, 319, 7, 7])
    weights = mx.array([1.0, 0.5, 2.0, 0.0, 1.0])

    def expected(hidden: mx.array) -> mx.array:
        return (nn.losses.cross_entropy(model.head(hidden), targets) * weights).sum()

    a, by_a = mx.value_and_grad(expected)(hidden)
    b, by_b, _ = loss_and_gradients(model, hidden, targets, weights)
    assert b.item() == pytest.approx(a.item(), rel=1e-6)
    assert mx.allclose(by_a, by_b, atol=1e-6)
    assert mx.all(by_b[3] == 0)


@pytest.mark.parametrize(
    ("lengths", "count"),
    [
        ([33] * 4, 128),  # all there are, and not all of them learned
        ([20] * 3, 57),
        ([33] * 12, 256),
    ],
)
def test_places_that_fill_up_teach_nothing(lengths: list[int], count: int) -> None:
    made = alone(examples(lengths, learned=0.5))
    plain, filled = (Arrays.of(made, fill_up=fill_up) for fill_up in (False, True))
    assert len(filled.places) == len(filled.targets) == len(filled.weights) == count
    assert filled.weights.sum().item() == len(plain.places) == len(made.places) < count
    model = model_of("tiny-no-glu")
    a, b = gradients(model, plain), gradients(model, filled)
    assert b[0] == pytest.approx(a[0], rel=1e-6)
    assert distance(b[1], a[1]) < CLOSE


def test_a_loss_far_from_the_target_is_finite() -> None:
    """Logits of a hundred thousand: the exponential of none of them is."""
    model = model_of("tiny-untied", "full")
    hidden = 1e6 * mx.random.normal((4, model.config.model_dim), key=mx.random.key(0))
    targets = mx.array([3, 4, 5, 6])
    expected = nn.losses.cross_entropy(model.head(hidden), targets).sum().item()
    found = float(loss_and_gradients(model, hidden, targets, mx.ones(4))[0])
    assert found == pytest.approx(expected, rel=1e-5)
    assert found > 1e4


def test_bfloat16_logits_are_summed_in_float32() -> None:
    made = examples(LENGTHS)
    model = model_of("tiny-untied", "full", dtype=mx.bfloat16)
    loss, expected = stock_gradients(model, made)
    found, ours = gradients(model, Arrays.of(alone(made), fill_up=False))
    assert found == pytest.approx(loss, rel=2e-3)
    assert distance(ours, expected) < 0.05
    assert {g.dtype for g in ours.values()} == {mx.bfloat16}


def test_the_models_parameters_are_its_own_afterwards() -> None:
    model = model_of("tiny-untied", targets=("lm_head",))
    before = trainable(model)
    loss_and_gradients(model, mx.ones((3, model.config.model_dim)), mx.array([1, 2, 3]), mx.ones(3))
    after = trainable(model)
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
