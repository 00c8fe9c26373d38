"""Training steps: they learn, leave alone what is frozen, and are counted right."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from openelm_mlx.benchmarks.models import Subject
from openelm_mlx.benchmarks.protocol import WINDOW, Spread
from openelm_mlx.benchmarks.train import (
    METHODS,
    LoRA,
    Training,
    TrainReport,
    lines,
    measure,
    parameters,
    prepare,
    random_batch,
    training_step,
)
from openelm_mlx.errors import OpenELMError
from openelm_mlx.loading import make_ready
from openelm_mlx.model import OpenELM
from tests.support.models import converted_folder, golden_model


@pytest.fixture(autouse=True)
def uncompiled(request: pytest.FixtureRequest) -> Iterator[None]:
    """On a CPU every kernel of the compiled step costs its first user half a second of a C++ compiler's time."""
    if not request.node.get_closest_marker("slow"):
        mx.disable_compile()
    yield
    mx.enable_compile()


def small(method: str, **changes: Any) -> Training:
    return Training(**{"method": method, "batch_size": 2, "seq_length": 8, "steps": 3, "rank": 4, **changes})


def weights(model: nn.Module) -> dict[str, mx.array]:
    flat: list[tuple[str, mx.array]] = tree_flatten(model.parameters())  # type: ignore[assignment]
    return {name: mx.array(value) for name, value in flat}


def check_the_loss_falls(method: str) -> None:
    model = golden_model("tiny-tied")
    make_ready(model, mx.float32)  # with whatever layers this machine is given at load
    prepare(model, small(method))
    batch = random_batch(model, small(method))
    step = training_step(model)
    losses = [step(batch) for _ in range(8)]
    assert losses == sorted(losses, reverse=True) and losses[0] - losses[-1] > 1e-3


@pytest.mark.parametrize("method", METHODS)
def test_the_loss_falls_on_a_repeated_batch(method: str) -> None:
    check_the_loss_falls(method)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_the_loss_falls_in_the_compiled_step(method: str) -> None:
    check_the_loss_falls(method)


def test_the_first_loss_is_the_mean_cross_entropy() -> None:
    model = golden_model("tiny-untied")
    batch = random_batch(model, small("full"))
    logits = np.array(model(batch[:, :-1]), np.float64)
    targets = np.array(batch)[:, 1:]
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -np.take_along_axis(logprobs, targets[..., None], axis=-1).mean()
    prepare(model, small("full"))
    assert training_step(model)(batch) == pytest.approx(expected, rel=1e-5)


def test_full_training_moves_every_weight() -> None:
    model = golden_model("tiny-tied")
    before = weights(model)
    prepare(model, small("full"))
    training_step(model)(random_batch(model, small("full")))
    after = weights(model)
    assert before.keys() == after.keys()
    assert [name for name in before if mx.array_equal(before[name], after[name])] == []


@pytest.mark.parametrize("packed", [False, True])
def test_lora_leaves_the_model_alone(packed: bool) -> None:
    model = golden_model("tiny-tied")
    if packed:
        nn.quantize(model, 32, 4)
    before = weights(model)
    prepare(model, small("lora"))
    step, batch = training_step(model), random_batch(model, small("lora"))
    for _ in range(2):
        step(batch)
    after = weights(model)
    base = {name.replace(".base.", "."): value for name, value in after.items() if ".lora_" not in name}
    assert base.keys() == before.keys()
    assert all(mx.array_equal(before[name], base[name]) for name in before)
    updates = {name: value for name, value in after.items() if name.endswith("lora_b")}
    assert len(updates) == 4 * len(model.layers)
    assert all(mx.abs(value).max() > 0 for value in updates.values())


def test_lora_begins_at_the_base() -> None:
    base = nn.Linear(6, 5, bias=False)
    x = mx.random.normal((2, 6))
    layer = LoRA(base, 3)
    assert mx.array_equal(layer(x), base(x))
    layer.lora_b = mx.ones((3, 5))
    update = 2.0 * np.array(x) @ np.array(layer.lora_a) @ np.ones((3, 5))
    np.testing.assert_allclose(np.array(layer(x)), np.array(base(x)) + update, rtol=1e-5, atol=1e-5)


def test_packed_weights_cannot_be_trained() -> None:
    model = golden_model("tiny-tied")
    nn.quantize(model, 32, 4)
    with pytest.raises(OpenELMError, match="packed"):
        prepare(model, small("full"))


def test_packed_parameters_count_as_what_they_stand_for() -> None:
    model = golden_model("tiny-tied")
    plain = parameters(model)
    assert plain == sum(value.size for value in weights(model).values())
    nn.quantize(model, 32, 4)
    assert parameters(model) == plain


@pytest.mark.parametrize("method", METHODS)
def test_a_report(tmp_path: Path, method: str) -> None:
    subject = Subject("tiny", folder=converted_folder(tmp_path / "m"))
    report = measure(subject, small(method))
    c = subject.config()
    full = parameters(golden_model("tiny-tied"))
    sides = [
        ((h + 2 * kv) * c.head_dim + c.model_dim) + (h * c.head_dim + c.model_dim) + (3 * ffn + 2 * c.model_dim)
        for h, kv, ffn in zip(c.num_query_heads, c.num_kv_heads, c.ffn_dims, strict=True)
    ]
    assert report.trained == (full if method == "full" else 4 * sum(sides))
    assert report.parameters == (full if method == "full" else full + 4 * sum(sides))
    assert len(report.tokens_per_s.values) == 3 and report.tokens_per_s.least > 0
    assert report.last_loss < report.first_loss
    assert report.peak_memory_gb * 1e9 > 4 * full
    assert json.loads(json.dumps(report.to_json()))["training"]["method"] == method
    assert "3 steps of 2 x 8 tokens" in lines(report)[0]


def test_a_loss_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> OpenELM:
        model = golden_model("tiny-tied")
        model.transformer.norm.weight = mx.full(model.transformer.norm.weight.shape, math.nan)
        return model

    monkeypatch.setattr("openelm_mlx.benchmarks.train.load_subject", broken)
    with pytest.raises(OpenELMError, match="tiny: the loss became nan after 0 steps"):
        measure(Subject("tiny", preset="OpenELM-270M"), small("full"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "some"}, "method must be one of full, lora"),
        ({"batch_size": 0}, "batch_size"),
        ({"steps": True}, "steps"),
        ({"rank": 1.5}, "rank"),
        ({"seq_length": WINDOW + 1}, "window of 2048"),
    ],
)
def test_wrong_options_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OpenELMError, match=message):
        small(**{"method": "full", **changes})


def test_a_report_in_words() -> None:
    report = TrainReport("m", "bf16", "metal", small("lora"), 10, 1000, Spread.of([1.0, 3.0, 2.0]), 6.5, 6.25, 1.5)
    assert lines(report) == [
        "m (bf16), LoRA of rank 4, on metal: 3 steps of 2 x 8 tokens",
        "  2.0 tokens/s (1.0 to 3.0)",
        "  trained 10 of 1,000 parameters; peak memory 1.50 GB; loss 6.500 -> 6.250",
    ]
