"""One update: accumulation, clipping, what is not finite, and the two ways of computing gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest

from openelm_mlx import device
from openelm_mlx.finetune.data.types import Batch
from openelm_mlx.finetune.losses import Arrays
from openelm_mlx.finetune.settings import Settings
from openelm_mlx.finetune.step import NotFinite, Trainer
from openelm_mlx.model import OpenELM
from openelm_mlx.trees import Tensors, flat, trainable
from tests.finetune.made import alone, batch_of, distance, examples, model_of, stock_gradients
from tests.support.models import golden_model

CASE = "tiny-no-glu"
LENGTHS = [33, 7, 2, 20]
RATE = 1e-2


@pytest.fixture(params=["written out", pytest.param("compiled", marks=pytest.mark.slow)])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How gradients are computed: as on a CPU, or as on a GPU."""
    if request.param == "compiled":
        monkeypatch.setattr(device, "backend", lambda: "metal")
    elif device.backend() != "cpu":
        pytest.skip("made for the CPU backend")
    return str(request.param)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "backend", lambda: "metal")


def settings(**values: Any) -> Settings:
    return Settings(**{"max_grad_norm": 0, "weight_decay": 0, **values})


def copies(model: OpenELM) -> Tensors:
    return {name: mx.array(p) for name, p in trainable(model).items()}


def same(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(mx.array_equal(a[name], b[name]) for name in a)


def losses_of(trainer: Trainer, batches: Sequence[Batch], steps: int = 3) -> list[float]:
    return [trainer.update(batches, RATE).loss for _ in range(steps)]


@pytest.mark.parametrize("method", ["lora", "dora", "full"])
def test_loss_and_norm_are_those_of_the_mean(way: str, method: str) -> None:
    made = examples(LENGTHS, learned=0.6)
    loss, gradients = stock_gradients(model_of(CASE, method), made)
    norm = mx.sqrt(mx.stack([mx.square(g).sum() for g in gradients.values()]).sum()).item()
    batch = alone(made)
    targets = sum(int(e.learn.sum()) for e in made)
    for each in (batch, batch_of([made[:2], made[2:]])):
        update = Trainer(model_of(CASE, method), settings(method=method)).update([each], RATE)
        assert update.loss == pytest.approx(loss / targets, rel=1e-5)
        assert update.norm == pytest.approx(norm / targets, rel=1e-4)
        assert (update.targets, update.tokens) == (targets, sum(len(e.ids) - 1 for e in made))


@pytest.mark.parametrize("method", ["lora", "full"])
def test_uneven_batches_add_up_to_one_large_one(way: str, method: str) -> None:
    """Every target counts alike, whichever batch it is in."""
    made = examples(LENGTHS, learned=0.6)
    parts = [alone(made[:1]), alone(made[1:3]), alone(made[3:])]
    results = []
    for batches in ([alone(made)], parts, parts[::-1]):
        model = model_of(CASE, method)
        trainer = Trainer(model, settings(method=method, eps=1e-3))
        updates = [trainer.update(batches, RATE) for _ in range(2)]
        results.append(([(u.loss, u.norm, u.targets, u.tokens) for u in updates], copies(model)))
    for figures, parameters in results[1:]:
        for ours, expected in zip(figures, results[0][0], strict=True):
            assert ours == pytest.approx(expected, rel=1e-4)
        assert distance(parameters, results[0][1]) < 1e-4


def test_gradients_of_bfloat16_add_up_in_float32(compiled: None) -> None:
    made = examples([4] * 8)
    whole = Trainer(model_of(CASE, "full", dtype=mx.bfloat16), settings(method="full"))
    parts = Trainer(model_of(CASE, "full", dtype=mx.bfloat16), settings(method="full"))
    exact = Trainer(model_of(CASE, "full"), settings(method="full")).update([alone(made)], RATE).norm
    assert whole.update([alone(made)], RATE).norm == pytest.approx(exact, rel=1e-2)
    assert parts.update([alone([e]) for e in made], RATE).norm == pytest.approx(exact, rel=1e-2)


def test_clipping_scales_the_gradient(way: str) -> None:
    """AdamW's first step does not show the scale, the moments do."""
    batch = alone(examples(LENGTHS))
    free, clipped, loose = (Trainer(model_of(CASE), settings(max_grad_norm=most)) for most in (0, 1e-3, 1e6))
    norms = [t.update([batch], RATE).norm for t in (free, clipped, loose)]
    assert norms[0] == norms[1] == norms[2] > 1e-3, "the norm is told as it was"
    share = 1e-3 / (norms[0] + 1e-6)
    for name, mean in free.optimizer.mean.items():
        assert mx.allclose(clipped.optimizer.mean[name], share * mean, rtol=1e-4, atol=1e-12)
        assert mx.array_equal(loose.optimizer.mean[name], mean)


@pytest.mark.parametrize("broken", ["loss", "gradient"])
def test_what_is_not_finite_changes_nothing(way: str, broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(CASE)
    trainer = Trainer(model, settings())
    good = alone(examples(LENGTHS))
    trainer.update([good], RATE)
    before, moments = copies(model), dict(trainer.optimizer.state)
    if broken == "loss":
        norm = model.transformer.norm.weight
        model.transformer.norm.weight = norm * math.nan
    else:
        monkeypatch.setattr("openelm_mlx.finetune.step.gradient_norm", lambda gradients: mx.array(math.inf))
    with pytest.raises(NotFinite, match=f"the {broken} is not finite"):
        trainer.update([good, good], RATE)
    assert same(copies(model), before)
    assert same(dict(trainer.optimizer.state), moments)
    assert trainer.optimizer.steps == 1
    if broken == "loss":
        model.transformer.norm.weight = norm
        assert math.isfinite(trainer.update([good], RATE).loss)


@pytest.mark.parametrize("method", ["lora", "dora", "full"])
def test_layers_computed_again_train_the_same(way: str, method: str) -> None:
    batches = [alone(examples(LENGTHS)), batch_of([examples(LENGTHS[:2]), examples(LENGTHS[2:])])]
    runs = []
    for again in (False, True):
        model = model_of(CASE, method)
        trainer = Trainer(model, settings(method=method, gradient_checkpointing=again, eps=1e-3))
        runs.append((losses_of(trainer, batches), copies(model)))
    assert runs[1][0] == pytest.approx(runs[0][0], rel=1e-6)
    assert distance(runs[1][1], runs[0][1]) < 1e-5


def test_layers_computed_again_drop_out_the_same(compiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the same without computing again: `mx.checkpoint` changes no gradient, whatever is random inside."""
    arrays = Arrays.of(alone(examples(LENGTHS)), fill_up=True)
    found = []
    for checkpoint in (mx.checkpoint, lambda function: function):
        monkeypatch.setattr(mx, "checkpoint", checkpoint)
        trainer = Trainer(model_of(CASE, dropout=0.4), settings(gradient_checkpointing=True))
        found.append([trainer._gradients(arrays, seed) for seed in (1, 2)])
    for (loss, ours), (expected, theirs) in zip(*found, strict=True):
        assert loss.item() == expected.item()
        assert distance(ours, theirs) < 1e-6
    assert found[0][0][0].item() != found[0][1][0].item(), "another seed hides something else"


@pytest.mark.slow
def test_layers_computed_again_need_less_memory(way: str) -> None:
    batch = alone(examples([129] * 4))
    peaks = []
    for again in (False, True):
        trainer = Trainer(model_of("tiny-tied"), settings(gradient_checkpointing=again))
        trainer.update([batch], RATE)
        mx.reset_peak_memory()
        trainer.update([batch], RATE)
        peaks.append(mx.get_peak_memory())
    assert peaks[1] < 0.8 * peaks[0]


@pytest.mark.slow
@pytest.mark.skipif(device.backend() != "cpu", reason="has no other way")
@pytest.mark.parametrize("method", ["lora", "dora", "full"])
def test_both_ways_train_the_same(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [alone(examples(LENGTHS, learned=0.5)), batch_of([examples(LENGTHS[:2]), examples(LENGTHS[2:])])]
    eager = losses_of(Trainer(model_of("tiny-tied", method, fast=True), settings(method=method)), batches)
    monkeypatch.setattr(device, "backend", lambda: "metal")
    compiled = losses_of(Trainer(model_of("tiny-tied", method), settings(method=method)), batches)
    assert compiled == pytest.approx(eager, rel=1e-4)
    assert eager[2] < eager[0]


def test_dropout_is_a_function_of_seed_and_step(way: str) -> None:
    batch = alone(examples(LENGTHS))

    def losses(seed: int) -> list[float]:
        return losses_of(Trainer(model_of(CASE, dropout=0.5), settings(seed=seed)), [batch, batch], 2)

    first = losses(1)
    mx.random.seed(99)
    assert losses(1) == first
    assert losses(2) != first
    resumed = Trainer(model_of(CASE, dropout=0.5), settings(seed=1))
    resumed.optimizer.steps = 1
    assert resumed.update([batch, batch], RATE).loss != first[0], "another step hides something else"


def test_evaluation_has_no_dropout_and_changes_nothing(way: str) -> None:
    made = examples(LENGTHS, learned=0.5)
    model = model_of(CASE, dropout=0.5)
    trainer = Trainer(model, settings())
    before = copies(model)
    losses = [trainer.evaluate(batch)["loss"] for batch in (alone(made), alone(made), batch_of([made[:2], made[2:]]))]
    assert losses == pytest.approx([stock_gradients(model_of(CASE), made)[0]] * 3, rel=1e-5)
    assert same(copies(model), before)
    assert trainer.update([alone(made)], RATE).loss > 0
    assert model.training


def test_an_embedding_adapter_is_trained(way: str) -> None:
    model = model_of(CASE, targets=("token_embeddings",))
    losses = losses_of(Trainer(model, settings()), [alone(examples(LENGTHS))], 5)
    assert losses[-1] < losses[0]


def test_only_what_is_trained_changes(way: str) -> None:
    model = model_of(CASE)
    names = trainable(model).keys()
    frozen = {name: mx.array(p) for name, p in flat(model.parameters()).items() if name not in names}
    losses_of(Trainer(model, settings()), [alone(examples(LENGTHS))])
    assert frozen
    assert all(mx.array_equal(flat(model.parameters())[name], p) for name, p in frozen.items())


@pytest.mark.slow
def test_memory_stays_over_a_thousand_steps(way: str) -> None:
    """Active memory: what is held, wherever the backend keeps it."""
    model = golden_model("tiny-no-qk-norm")
    model.freeze()
    model.layers[-1].ffn.unfreeze()
    trainer = Trainer(model, settings(method="full"))
    batches = [alone(examples([n, n + 3], seed=n)) for n in (4, 9, 6)]
    for _ in range(10):
        trainer.update(batches[:1], 1e-4)
    before = mx.get_active_memory()
    for step in range(1000 if way == "written out" else 300):
        trainer.update([batches[step % 3]], 1e-4)
    assert mx.get_active_memory() - before < 64 * 1024
