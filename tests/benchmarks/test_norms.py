"""The naive RMSNorm, against numpy and MLX's, and the report about it."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from openelm_mlx.benchmarks.models import Subject
from openelm_mlx.benchmarks.norms import lines, measure, naive_norms, naive_rms_norm, norm_layers
from openelm_mlx.benchmarks.protocol import Protocol
from openelm_mlx.config import OpenELMConfig
from openelm_mlx.loading import make_ready
from tests.support.models import GLU_CASES, converted_folder, golden_model


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("scaled", [True, False])
def test_the_naive_norm_is_the_fused_one(dtype: mx.Dtype, scaled: bool) -> None:
    x = (mx.random.normal((2, 3, 64), key=mx.random.key(1)) * 5).astype(dtype)
    weight = mx.random.normal((64,), key=mx.random.key(2)).astype(dtype) if scaled else None
    naive = naive_rms_norm(x, weight, 1e-6)
    assert naive.dtype == dtype
    tolerance = 1e-5 if dtype == mx.float32 else 0.03
    assert mx.allclose(naive, mx.fast.rms_norm(x, weight, 1e-6), rtol=tolerance, atol=tolerance)


def test_the_naive_norm_by_numpy() -> None:
    x = np.array([[1.0, -2.0, 2.0, 4.0]])
    weight = np.array([1.0, 2.0, 3.0, 4.0])
    expected = x / np.sqrt((1 + 4 + 4 + 16) / 4 + 0.5) * weight
    got = naive_rms_norm(mx.array(x, mx.float32), mx.array(weight, mx.float32), 0.5)
    np.testing.assert_allclose(np.array(got), expected, rtol=1e-6)


@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize("case", GLU_CASES)
def test_a_model_with_naive_norms_says_the_same(case: str, ready: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
        calls.append(x.shape)
        return naive_rms_norm(x, weight, eps)

    model = golden_model(case)
    if ready:  # with whatever layers this machine is given at load
        make_ready(model, mx.float32)
    ids = mx.array([[5, 9, 2, 7]])
    own = model(ids)
    monkeypatch.setattr("openelm_mlx.benchmarks.norms.naive_rms_norm", counted)
    with naive_norms(model):
        assert mx.allclose(model(ids), own, rtol=1e-4, atol=1e-4)
    naive = len(calls)
    assert naive == (3 if model.config.normalize_qk_projections else 2) * len(model.layers) + 1
    assert mx.array_equal(model(ids), own)
    assert len(calls) == naive


def test_no_fused_norm_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def fused(*_: object) -> mx.array:
        raise AssertionError("a fused norm was called")

    model = golden_model("tiny-tied")
    monkeypatch.setattr(mx.fast, "rms_norm", fused)
    with naive_norms(model):
        mx.eval(model(mx.array([[1, 2]])))
    with pytest.raises(AssertionError, match="fused"):
        model(mx.array([[1, 2]]))


def test_norms_come_back_after_an_error() -> None:
    model = golden_model("tiny-tied")
    own = model.transformer.norm
    with pytest.raises(KeyError), naive_norms(model):
        raise KeyError
    assert model.transformer.norm is own


def test_the_paper_counts_113_norms() -> None:
    assert norm_layers(OpenELMConfig.preset("OpenELM-1_1B")) == 113
    assert norm_layers(OpenELMConfig.preset("OpenELM-1_1B", normalize_qk_projections=False)) == 57


def test_a_report(tmp_path: Path) -> None:
    subject = Subject("tiny", folder=converted_folder(tmp_path / "m"))
    report = measure(subject, Protocol(prompt_tokens=4, gen_tokens=4, repeats=2))
    config = subject.config()
    assert [(t.rows, t.width) for t in report.times] == [
        (1, config.model_dim),
        (max(h + kv for h, kv in zip(config.num_query_heads, config.num_kv_heads, strict=True)), config.head_dim),
    ]
    assert len(report.naive_tps.values) == len(report.own_tps.values) == 2
    assert all(t.naive_us.least > 0 and t.fast_us.least > 0 for t in report.times)
    assert report.norm_layers == norm_layers(config)
    values = json.loads(json.dumps(report.to_json()))
    assert values["speedup"] == report.speedup and values["times"][0]["ratio"] == report.times[0].ratio
    text = lines(report)
    assert text[0] == f"tiny (stored), {report.norm_layers} norm layers, on {report.backend}"
    rows = str(report.times[1].rows)
    assert [line.split()[0] for line in text[1:7]] == ["one", "1", rows, "whole", "naive", "its"]
    assert len(text) == 8 + (report.backend == "cpu")
