"""Packed layers become float32 ones of the same values."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from openelm_mlx.cpu import unpacking
from tests.support.models import golden_model


class Nested(nn.Module):
    """Layers at every kind of place: by name, in a list, below another module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 32, bias=False)
        self.norm = nn.RMSNorm(32)
        self.blocks = [nn.Sequential(nn.Linear(64, 96, bias=False)), nn.Embedding(50, 64)]


def parameters(model: nn.Module) -> dict[str, mx.array]:
    flat: Any = tree_flatten(model.parameters())
    return dict(flat)


def bytes_of(model: nn.Module) -> int:
    return sum(p.nbytes for p in parameters(model).values())


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_values_names_and_sizes(bits: int, dtype: mx.Dtype) -> None:
    model = Nested()
    model.set_dtype(dtype)
    names = {n: p.shape for n, p in parameters(model).items()}
    nn.quantize(model, group_size=32, bits=bits)
    packed = parameters(model)
    foretold, norm = unpacking.float32_bytes(model), packed["norm.weight"].nbytes
    unpacking.unpack(model)
    found = parameters(model)
    assert {n: p.shape for n, p in found.items()} == names
    assert bytes_of(model) == foretold + norm
    for name in names.keys() - {"norm.weight"}:
        path = name.removesuffix(".weight")
        scales, biases = (packed[f"{path}.{x}"].astype(mx.float32) for x in ("scales", "biases"))
        expected = mx.dequantize(packed[name], scales, biases, group_size=32, bits=bits)
        assert found[name].dtype == mx.float32
        assert mx.array_equal(found[name], expected), name
    assert mx.array_equal(found["norm.weight"], packed["norm.weight"])


def test_other_layers_are_left_alone() -> None:
    model = Nested()
    nn.quantize(model, group_size=32, bits=4, class_predicate=lambda path, _: path == "first")
    others = {n: p for n, p in parameters(model).items() if not n.startswith("first")}
    assert unpacking.float32_bytes(model) == 64 * 32 * 4
    unpacking.unpack(model)
    assert type(model.first) is nn.Linear
    assert all(parameters(model)[n] is p for n, p in others.items())
    unpacking.unpack(model)
    assert unpacking.float32_bytes(model) == 0


def test_without_biases() -> None:
    """The formats of microscaling have scales alone."""
    model = Nested()
    nn.quantize(model, group_size=32, bits=4, mode="mxfp4")
    packed = {n: p + 0 for n, p in parameters(model).items()}
    x = mx.random.normal((3, 64), key=mx.random.key(0))
    foretold, before = unpacking.float32_bytes(model), model.first(x)
    unpacking.unpack(model)
    expected = mx.dequantize(packed["first.weight"], packed["first.scales"], group_size=32, bits=4, mode="mxfp4")
    assert mx.array_equal(model.first.weight, expected.astype(mx.float32))
    assert bytes_of(model) == foretold + packed["norm.weight"].nbytes
    assert mx.allclose(model.first(x), before, atol=1e-5)


def test_nothing_is_evaluated_yet() -> None:
    model = nn.Sequential(nn.Linear(1024, 1024, bias=False))
    nn.quantize(model, bits=4)
    mx.eval(model.parameters())
    before = mx.get_active_memory()
    unpacking.unpack(model)
    assert mx.get_active_memory() - before < 1 << 20
    mx.eval(model.parameters())
    assert mx.get_active_memory() - before > 3 << 20


@pytest.mark.parametrize("case", ["tiny-tied", "tiny-untied"])
def test_the_model_computes_what_it_did(case: str) -> None:
    """With the embedding packed too, which is the output head where the two are tied."""
    model = golden_model(case)
    fits = {n for n, m in model.named_modules() if hasattr(m, "to_quantized") and m.weight.shape[1] % 32 == 0}
    nn.quantize(model, group_size=32, bits=4, class_predicate=lambda path, _: path in fits)
    ids = mx.array([[3, 141, 59, 26, 53]])
    before = model(ids)
    unpacking.unpack(model)
    assert "transformer.token_embeddings" in fits
    assert not any(isinstance(m, (nn.QuantizedLinear, nn.QuantizedEmbedding)) for m in model.modules())
    assert float(mx.abs(model(ids) - before).max()) < 1e-5
