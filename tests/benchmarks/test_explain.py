"""What `openelm bench --explain` says, by structure: no times are asserted."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from openelm_mlx import device
from openelm_mlx.benchmarks.explain import (
    ATTENTION,
    BUILDING,
    CACHE,
    NORMS,
    NORMS_AND_ROPE,
    OTHER,
    PRODUCTS,
    ROPE,
    SAMPLING,
    SWIGLU,
    explain,
    lines,
)
from openelm_mlx.cache import make_cache
from openelm_mlx.errors import OpenELMError
from openelm_mlx.loading import make_ready
from openelm_mlx.model import OpenELM
from tests.support.models import GLU_CASES, golden_config, golden_model


@pytest.mark.parametrize("case", GLU_CASES)
def test_parts_make_up_the_step(case: str) -> None:
    model = golden_model(case)
    e = explain(model, context=12, repeats=2)
    parts = {part.name: part for part in e.parts}
    assert list(parts) == [PRODUCTS, NORMS, ROPE, ATTENTION, SWIGLU, CACHE, SAMPLING, BUILDING, OTHER]
    assert all(part.ms > 0 for name, part in parts.items() if name != OTHER)
    assert sum(part.ms for part in e.parts) == pytest.approx(e.step_ms)
    assert sum(part.percent for part in e.parts) == pytest.approx(100)
    assert e.generation_ms > 0
    layers = len(model.layers)
    assert parts[PRODUCTS].calls == 4 * layers + 1
    assert parts[ATTENTION].calls == parts[SWIGLU].calls == layers
    assert parts[ROPE].calls == layers  # queries and keys in one
    # Those of queries and keys are one RMSNorm and one multiplication.
    assert parts[NORMS].calls == (4 if model.config.normalize_qk_projections else 2) * layers + 1


def test_a_model_made_ready_for_this_machine() -> None:
    """As it is measured: with whatever layers its backend is given at load."""
    model = golden_model("tiny-tied")
    make_ready(model, mx.float32)
    layers = len(model.layers)
    calls = {part.name: part.calls for part in explain(model, context=12, repeats=1).parts}
    assert calls[PRODUCTS] == 4 * layers + 1
    assert calls[NORMS_AND_ROPE if device.backend() == "cpu" else ROPE] == calls[ATTENTION] == calls[SWIGLU] == layers
    assert (calls[NORMS] or 0) >= 2 * layers + 1


def test_packed_layers() -> None:
    model = golden_model("tiny-tied")
    nn.quantize(model, 32, 4)
    mx.eval(model.parameters())
    parts = {part.name: part for part in explain(model, context=5, repeats=1).parts}
    assert parts[PRODUCTS].calls == 4 * len(model.layers) + 1


def test_the_model_is_left_as_it_was() -> None:
    model = golden_model("tiny-tied")
    ids = mx.array([[1, 2, 3]])
    before = model(ids)
    kinds = [type(m).__call__ for m in model.modules()]
    attention = type(model.layers[0].attn)
    functions = mx.addmm, mx.fast.rms_norm, OpenELM.head, attention.prepare, attention.attend
    explain(model, context=5, repeats=1)
    assert [type(m).__call__ for m in model.modules()] == kinds
    assert functions == (mx.addmm, mx.fast.rms_norm, OpenELM.head, attention.prepare, attention.attend)
    assert mx.array_equal(model(ids, cache=make_cache(model)), before)


def test_lines_name_every_part() -> None:
    e = explain(golden_model("tiny-tied"), context=5, repeats=1)
    text = lines(e)
    assert text[0].startswith(f"One decode step at 5 tokens of context, on {e.backend}: ")
    assert len(text) == len(e.parts) + 2
    for part, line in zip(e.parts, text[1:], strict=False):
        assert line.strip().startswith(part.name)
    assert json.loads(json.dumps(e.to_json()))["parts"][0]["name"] == PRODUCTS


def test_a_small_window_is_half_full_by_default() -> None:
    window = 80
    small = OpenELM(dataclasses.replace(golden_config("tiny-tied"), max_context_length=window))
    assert explain(small, repeats=1).context == window // 2


@pytest.mark.parametrize(
    ("options", "message"),
    [({"context": 0}, "context"), ({"context": 2048}, "window of 2048"), ({"repeats": 0}, "repeats")],
)
def test_what_cannot_be_measured_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OpenELMError, match=message):
        explain(golden_model("tiny-tied"), **options)
