"""AdamW against a loop written out in NumPy and PyTorch's own; the schedules by hand."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
import pytest

from openelm_mlx.finetune import optimizer
from openelm_mlx.finetune.optimizer import AdamW, gradient_norm, learning_rate, warmup_steps
from openelm_mlx.finetune.settings import Settings
from openelm_mlx.trees import Tensors, trainable

Array = npt.NDArray[np.float64]
SETTINGS = Settings(beta1=0.9, beta2=0.95, eps=1e-6, weight_decay=0.1)
RATES = [1e-2, 5e-3, 2e-2, 1e-3, 1e-2]


class Model(nn.Module):
    """A matrix, a norm, and something frozen."""

    def __init__(self, dtype: mx.Dtype = mx.float32) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 3, bias=False)
        self.ffn_norm = nn.RMSNorm(3)
        self.frozen = nn.Linear(2, 2)
        values = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
        self.proj.weight = mx.array(values)
        self.set_dtype(dtype)
        self.frozen.freeze()


def gradients(step: int, dtype: mx.Dtype = mx.float32) -> Tensors:
    random = np.random.default_rng(step + 1)
    shapes = {"proj.weight": (3, 4), "ffn_norm.weight": (3,)}
    return {n: mx.array(random.standard_normal(s).astype(np.float32)).astype(dtype) for n, s in shapes.items()}


def as_numpy(x: mx.array) -> Array:
    return np.array(x.astype(mx.float32), np.float64)


def train(model: Model, settings: Settings = SETTINGS, scale: float = 1.0) -> AdamW:
    made = AdamW(trainable(model), settings)
    for step, rate in enumerate(RATES):
        made.update(model, gradients(step, model.proj.weight.dtype), rate, scale)
    return made


def by_hand(start: Array, name: str, decay: float, scale: float = 1.0, dtype: mx.Dtype = mx.float32) -> Array:
    p, m, v = start.copy(), np.zeros_like(start), np.zeros_like(start)
    for t, rate in enumerate(RATES, 1):
        g = as_numpy(gradients(t - 1, dtype)[name]) * scale
        m = 0.9 * m + 0.1 * g
        v = 0.95 * v + 0.05 * g * g
        p = p * (1 - rate * decay)
        p = p - rate * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.95**t)) + 1e-6)
    return p


@pytest.mark.parametrize("scale", [1.0, 0.01])
@pytest.mark.parametrize("excluded", [("norm",), ()])
def test_adamw_is_the_written_out_loop(scale: float, excluded: tuple[str, ...]) -> None:
    model = Model()
    start = {name: as_numpy(p) for name, p in trainable(model).items()}
    settings = Settings(beta2=0.95, eps=1e-6, weight_decay=0.1, decay_exclude=excluded)
    train(model, settings, scale)
    for name, decay in (("proj.weight", 0.1), ("ffn_norm.weight", 0.0 if excluded else 0.1)):
        expected = by_hand(start[name], name, decay, scale)
        assert np.abs(as_numpy(trainable(model)[name]) - expected).max() < 1e-6


def test_the_first_step_is_as_long_as_the_learning_rate() -> None:
    """That is what bias correction does; without it, it would be sqrt(0.05) / 0.1 times as long or so."""
    model = Model()
    before = as_numpy(model.proj.weight)
    made = AdamW(trainable(model), Settings(weight_decay=0))
    made.update(model, gradients(0), 1e-3)
    assert np.allclose(np.abs(as_numpy(model.proj.weight) - before), 1e-3, rtol=1e-3)


@pytest.mark.reference
def test_adamw_is_pytorchs() -> None:
    torch: Any = pytest.importorskip("torch")
    model = Model()
    p = torch.nn.Parameter(torch.tensor(np.array(model.proj.weight)))
    theirs = torch.optim.AdamW([p], betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
    train(model)
    for step, rate in enumerate(RATES):
        theirs.param_groups[0]["lr"] = rate
        p.grad = torch.tensor(np.array(gradients(step)["proj.weight"]))
        theirs.step()
    assert np.abs(np.array(model.proj.weight) - p.detach().numpy()).max() < 1e-6


def test_bfloat16_parameters_have_exact_copies() -> None:
    model = Model(mx.bfloat16)
    start = as_numpy(model.proj.weight)
    made = train(model)
    expected = by_hand(start, "proj.weight", 0.1, dtype=mx.bfloat16)
    assert np.abs(as_numpy(made.exact["proj.weight"]) - expected).max() < 1e-6
    assert model.proj.weight.dtype == mx.bfloat16
    assert mx.array_equal(model.proj.weight, made.exact["proj.weight"].astype(mx.bfloat16))
    assert made.mean["proj.weight"].dtype == made.square["proj.weight"].dtype == mx.float32


def test_steps_too_small_for_bfloat16_add_up() -> None:
    model = Model(mx.bfloat16)
    model.proj.weight = mx.ones((3, 4), mx.bfloat16)
    made = AdamW(trainable(model), Settings(weight_decay=0))
    for _ in range(100):
        made.update(model, {n: mx.ones(p.shape, mx.bfloat16) for n, p in trainable(model).items()}, 1e-4)
    assert mx.allclose(model.proj.weight.astype(mx.float32), mx.array(0.99), atol=2e-3)


def test_float32_parameters_have_no_copies() -> None:
    assert AdamW(trainable(Model()), SETTINGS).exact == {}


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_it_goes_on_from_its_state(dtype: mx.Dtype) -> None:
    whole, first = Model(dtype), Model(dtype)
    expected = train(whole)
    made = AdamW(trainable(first), SETTINGS)
    for step in range(2):
        made.update(first, gradients(step, dtype), RATES[step])
    second = AdamW(trainable(first), SETTINGS)
    second.load_state(dict(made.state), 2)
    for step in range(2, len(RATES)):
        second.update(first, gradients(step, dtype), RATES[step])
    assert mx.array_equal(first.proj.weight, whole.proj.weight)
    assert second.steps == expected.steps == len(RATES)
    assert second.state.keys() == expected.state.keys()
    assert all(mx.array_equal(second.state[name], expected.state[name]) for name in expected.state)


def test_parameters_are_updated_in_groups_and_gradients_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, grouped = Model(), Model()
    train(whole)
    monkeypatch.setattr(optimizer, "_AT_ONCE", 1)
    train(grouped)
    assert mx.array_equal(whole.proj.weight, grouped.proj.weight)
    given = gradients(0)
    AdamW(trainable(whole), SETTINGS).update(whole, given, 1e-3)
    assert given == {}


def test_what_is_frozen_stays() -> None:
    model = Model()
    before = model.frozen.weight
    train(model)
    assert model.frozen.weight is before


def test_an_update_needs_little_more_than_what_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Old values are let go group by group: not twice the parameters and moments."""
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(16)))
    monkeypatch.setattr(optimizer, "_AT_ONCE", 256 * 256 * 4)
    made = AdamW(trainable(model), SETTINGS)
    given = {name: mx.ones(p.shape) for name, p in trainable(model).items()}
    mx.eval(model.parameters(), made.state, given)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    made.update(model, given, 1e-3)
    assert mx.get_peak_memory() - before < 6 * 256 * 256 * 4


def test_the_norm_is_that_of_all_gradients_together() -> None:
    given = {"a": mx.array([3.0, 0.0]), "b": mx.array([[4.0]], mx.bfloat16), "c": mx.array([12.0])}
    assert gradient_norm(given).item() == pytest.approx(13.0)
    assert math.isnan(float(gradient_norm({"a": mx.array([math.nan]), "b": mx.ones(2)})))


class TestLearningRate:
    def rates(self, total: int, **settings: Any) -> list[float]:
        s = Settings(learning_rate=1.0, **settings)
        return [learning_rate(step, total, s) for step in range(total)]

    def test_constant(self) -> None:
        assert self.rates(5, schedule="constant", warmup_steps=2) == [0.5, 1, 1, 1, 1]

    def test_linear(self) -> None:
        found = self.rates(6, schedule="linear", warmup_steps=2, final_learning_rate=0.2)
        assert found == pytest.approx([0.5, 1, 1, 0.8, 0.6, 0.4])

    def test_cosine(self) -> None:
        found = self.rates(8, schedule="cosine", warmup_steps=0, final_learning_rate=0.1)
        assert found == pytest.approx([0.1 + 0.45 * (1 + math.cos(math.pi * k / 8)) for k in range(8)])
        assert found[0] == 1
        assert found[4] == pytest.approx(0.55)

    def test_a_twentieth_is_warm_up_unless_told(self) -> None:
        assert [warmup_steps(total, Settings()) for total in (10, 40, 1000)] == [0, 2, 50]
        assert warmup_steps(1000, Settings(warmup_steps=7)) == 7
        assert all(warmup_steps(total, Settings()) == total // 20 for total in range(2000))
        assert warmup_steps(100, Settings(warmup_ratio=0.29)) == 29
        assert warmup_steps(100, Settings(warmup_ratio=0)) == 0
        assert self.rates(40)[:3] == pytest.approx([0.5, 1, 1])

    def test_all_of_it_can_be_warm_up(self) -> None:
        assert self.rates(4, warmup_steps=4) == [0.25, 0.5, 0.75, 1]
        assert learning_rate(4, 4, Settings(learning_rate=1.0, warmup_steps=4)) == 1

    def test_corenets_course(self) -> None:
        """1,000 of 4,375 updates up to 3e-4, then by a cosine to 3e-5."""
        s = Settings(learning_rate=3e-4, final_learning_rate=3e-5, warmup_steps=1000)
        assert learning_rate(999, 4375, s) == pytest.approx(3e-4)
        assert learning_rate(1000 + 3375 // 3, 4375, s) == pytest.approx(3e-5 + 2.7e-4 * 0.75)
        assert learning_rate(4374, 4375, s) == pytest.approx(3e-5, rel=1e-3)
