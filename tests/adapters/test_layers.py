"""The layers against plain numpy in float64, and against mlx-lm's with the same parameters."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
import pytest
from mlx.utils import tree_flatten

from openelm_mlx.adapters import AdapterConfig
from openelm_mlx.adapters.layers import DoRALinear, LoRAEmbedding, LoRALinear, adapted, shape_of, weight_of
from openelm_mlx.cpu import halves
from openelm_mlx.device import backend
from tests.adapters.made import array, train

IN, OUT, RANK = 64, 96, 4
CONFIG = AdapterConfig(rank=RANK, alpha=6)
KINDS = ("plain", "bfloat16", "4 bits", "8 bits")
Array = npt.NDArray[np.float64]


def linear(kind: str = "plain") -> nn.Module:
    layer = nn.Linear(IN, OUT, bias=False)
    layer.weight = 0.3 * mx.random.normal((OUT, IN), key=mx.random.key(7))
    if kind == "bfloat16":
        layer.weight = layer.weight.astype(mx.bfloat16)
        return layer
    return layer if kind == "plain" else layer.to_quantized(32, int(kind[0]))


def layer_of(method: str, kind: str = "plain", dropout: float = 0.0, seed: int = 3) -> Any:
    config = AdapterConfig(method=method, rank=RANK, alpha=6, dropout=dropout)
    return adapted(linear(kind), config, mx.random.key(seed))


def inputs(*shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(5))


def numpy_lora(weight: Array, layer: Any, x: Array) -> Array:
    return x @ weight.T + layer.scale * (x @ array(layer.lora_a)) @ array(layer.lora_b)


def numpy_dora(weight: Array, layer: Any, x: Array) -> Array:
    sum_ = weight + layer.scale * (array(layer.lora_a) @ array(layer.lora_b)).T
    return x @ (sum_ * (array(layer.m) / np.linalg.norm(sum_, axis=1))[:, None]).T


def unpacked(layer: nn.Module) -> Array:
    """A base's weight by MLX's own word."""
    if isinstance(layer, nn.QuantizedLinear):
        return array(mx.dequantize(layer.weight, layer.scales, layer.biases, layer.group_size, layer.bits))
    return array(layer.weight)


class TestLinears:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("method", ["lora", "dora"])
    def test_begins_as_the_base(self, method: str, kind: str) -> None:
        layer, x = layer_of(method, kind), inputs(2, 5, IN)
        np.testing.assert_allclose(array(layer(x)), array(layer.base(x)), atol=2e-5)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("method", ["lora", "dora"])
    @pytest.mark.parametrize("training", [False, True])
    def test_values(self, method: str, kind: str, training: bool) -> None:
        layer, x = layer_of(method, kind), inputs(2, 5, IN)
        train(layer)
        layer.train(training)
        weight = unpacked(layer.base)
        expected = (numpy_dora if method == "dora" else numpy_lora)(weight, layer, array(x))
        assert np.abs(expected - array(x) @ weight.T).max() > 0.3, "the adapter does something"
        np.testing.assert_allclose(array(layer(x)), expected, atol=2e-5)
        np.testing.assert_allclose(array(x @ layer.fused_weight().T), expected, atol=2e-5)

    def test_the_output_has_the_inputs_dtype(self) -> None:
        for method in ("lora", "dora"):
            layer, x = layer_of(method, "bfloat16"), inputs(3, IN)
            train(layer)
            y = layer(x.astype(mx.bfloat16))
            assert y.dtype == mx.bfloat16
            assert layer.lora_a.dtype == layer.lora_b.dtype == mx.float32
            np.testing.assert_allclose(array(y), array(layer(x)), atol=0.1)

    @pytest.mark.parametrize("method", ["lora", "dora"])
    def test_the_update_of_some_outputs(self, method: str) -> None:
        layer, x = layer_of(method), inputs(3, IN)
        train(layer)
        some = slice(10, 30)
        part = layer.add_update(x @ layer.base.weight[some].T, x, some)
        np.testing.assert_allclose(array(part), array(layer(x))[:, some], atol=2e-5)

    def test_shapes_of_packed_layers(self) -> None:
        for kind in KINDS:
            assert shape_of(linear(kind)) == (OUT, IN)
            assert weight_of(linear(kind)).dtype == mx.float32

    @pytest.mark.skipif(backend() != "cpu" or not halves.possible(), reason="a kernel of the CPU backend")
    @pytest.mark.parametrize("method", ["lora", "dora"])
    def test_over_a_matrix_kept_in_bfloat16(self, method: str) -> None:
        layer, x = layer_of(method, "bfloat16"), inputs(3, IN)
        train(layer)
        expected = array(layer(x))
        layer.base.__class__ = halves.HalfLinear
        layer.eval()
        np.testing.assert_allclose(array(layer(x)), expected, atol=2e-5)


class TestDoRA:
    def test_the_magnitude_begins_as_the_bases_row_norms(self) -> None:
        for kind in KINDS:
            layer = layer_of("dora", kind)
            np.testing.assert_allclose(array(layer.m), np.linalg.norm(unpacked(layer.base), axis=1), rtol=1e-5)

    def test_a_changed_adapter_is_seen(self) -> None:
        layer, x = layer_of("dora"), inputs(3, IN)
        train(layer, 1)
        first = array(layer(x))
        np.testing.assert_array_equal(array(layer(x)), first)
        train(layer, 2)
        assert np.abs(array(layer(x)) - first).max() > 0.1
        np.testing.assert_allclose(array(layer(x)), numpy_dora(unpacked(layer.base), layer, array(x)), atol=2e-5)

    @pytest.mark.parametrize("kind", ["plain", "4 bits"])
    def test_gradients_take_the_norm_for_a_constant(self, kind: str) -> None:
        """By hand: y = f (W x + s B A x), f = m / |W + s B A|, of which m alone has a gradient."""
        layer, x, g = layer_of("dora", kind), inputs(5, IN), mx.random.normal((5, OUT), key=mx.random.key(9))
        layer.freeze()
        layer.unfreeze(keys=["lora_a", "lora_b", "m"], recurse=False)
        train(layer)
        layer.train()

        def loss(layer: nn.Module) -> mx.array:
            return (layer(x) * g).sum()

        flat: Any = tree_flatten(nn.value_and_grad(layer, loss)(layer)[1])
        grads: dict[str, mx.array] = dict(flat)
        weight, X, G = unpacked(layer.base), array(x), array(g)
        a, b, m, s = array(layer.lora_a), array(layer.lora_b), array(layer.m), layer.scale
        norm = np.linalg.norm(weight + s * (a @ b).T, axis=1)
        inner = X @ weight.T + s * X @ a @ b
        f = m / norm
        assert set(grads) == {"lora_a", "lora_b", "m"}
        np.testing.assert_allclose(array(grads["m"]), (G * inner).sum(0) / norm, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(array(grads["lora_b"]), s * (X @ a).T @ (G * f), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(array(grads["lora_a"]), s * X.T @ ((G * f) @ b.T), rtol=1e-4, atol=1e-4)

    def test_a_compiled_step_gives_the_same(self) -> None:
        layer, x = layer_of("dora"), inputs(3, IN)
        train(layer)
        layer.train()
        step = mx.compile(lambda x: layer(x), inputs=layer.state)
        expected = array(layer(x))
        np.testing.assert_allclose(array(step(x)), expected, atol=1e-5)
        train(layer, 5)
        np.testing.assert_allclose(array(step(x)), array(layer(x)), atol=1e-5)
        assert np.abs(array(step(x)) - expected).max() > 0.1


class TestEmbedding:
    @pytest.fixture(params=["plain", "4 bits"])
    def layer(self, request: pytest.FixtureRequest) -> Any:
        base = nn.Embedding(OUT, IN)
        return LoRAEmbedding(base.to_quantized(32, 4) if request.param != "plain" else base, CONFIG, mx.random.key(2))

    def test_begins_as_the_base(self, layer: Any) -> None:
        ids = mx.array([[0, 5, 95]])
        assert mx.array_equal(layer(ids), layer.base(ids))
        assert not layer.lora_a.any()
        assert layer.lora_b.any()

    def test_values(self, layer: Any) -> None:
        train(layer)
        table = array(weight_of(layer.base)) + layer.scale * array(layer.lora_a) @ array(layer.lora_b)
        np.testing.assert_allclose(array(layer(mx.array([[0, 5, 95]]))), table[[[0, 5, 95]]], atol=1e-5)
        np.testing.assert_allclose(array(layer.fused_weight()), table, atol=1e-5)

    def test_the_head_is_the_base_alone(self, layer: Any) -> None:
        train(layer)
        x = inputs(3, IN)
        assert mx.array_equal(layer.as_linear(x), layer.base.as_linear(x))

    def test_dora_leaves_embeddings_to_lora(self) -> None:
        config = AdapterConfig(method="dora", rank=RANK)
        assert type(adapted(nn.Embedding(OUT, IN), config, mx.random.key(0))) is LoRAEmbedding
        assert type(adapted(linear(), config, mx.random.key(0))) is DoRALinear


class TestDropout:
    @pytest.mark.parametrize("method", ["lora", "dora"])
    def test_only_in_training_and_only_on_the_update(self, method: str) -> None:
        layer, x = layer_of(method, dropout=0.5), inputs(4, IN)
        train(layer)
        layer.eval()
        still = array(layer(x))
        np.testing.assert_array_equal(array(layer(x)), still)
        layer.train()
        mx.random.seed(0)
        outputs = np.stack([array(layer(x)) for _ in range(400)])
        assert np.abs(outputs[0] - outputs[1]).max() > 0.1
        np.testing.assert_allclose(outputs.mean(0), still, atol=0.25)
        layer.lora_b = mx.zeros_like(layer.lora_b)
        layer.m = mx.sqrt(mx.square(layer.base.weight).sum(1)) if method == "dora" else None
        np.testing.assert_allclose(array(layer(x)), array(layer.base(x)), atol=2e-5)

    def test_of_an_embedding(self) -> None:
        config = AdapterConfig(rank=RANK, dropout=0.5)
        layer: Any = adapted(nn.Embedding(OUT, IN), config, mx.random.key(1))
        train(layer)
        ids = mx.array([1, 2, 3])
        layer.eval()
        assert mx.array_equal(layer(ids), layer(ids))
        layer.train()
        update = array(layer(ids) - layer.base(ids))
        whole = layer.scale * array(layer.lora_a)[[1, 2, 3]] @ array(layer.lora_b)
        kept = np.abs(update) > 1e-6
        assert 0.3 < kept.mean() < 0.7
        np.testing.assert_allclose(update[kept], 2 * whole[kept], rtol=1e-3, atol=1e-4)


def test_beginnings_are_a_function_of_the_key() -> None:
    one, same, other = (layer_of("lora", seed=seed).lora_a for seed in (3, 3, 4))
    assert mx.array_equal(one, same)
    assert not mx.array_equal(one, other)
    assert float(mx.abs(one).max()) <= IN**-0.5
    assert float(one.std()) == pytest.approx(IN**-0.5 / 3**0.5, rel=0.1)


class TestBesideMlxLm:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("method", ["lora", "dora"])
    def test_linears(self, method: str, kind: str) -> None:
        from mlx_lm.tuner.dora import DoRALinear as TheirDoRA
        from mlx_lm.tuner.lora import LoRALinear as TheirLoRA

        ours, x = layer_of(method, kind), inputs(2, 5, IN)
        their_kind: Any = TheirDoRA if method == "dora" else TheirLoRA
        theirs = their_kind.from_base(ours.base, r=RANK, scale=ours.scale)
        train(ours)
        theirs.load_weights([(n, ours[n]) for n in ("lora_a", "lora_b", "m") if n in ours], strict=False)
        np.testing.assert_allclose(array(ours(x)), array(theirs(x)), atol=0.05 if kind == "bfloat16" else 2e-5)

    def test_embeddings_but_for_the_head(self) -> None:
        from mlx_lm.tuner.lora import LoRAEmbedding as Theirs

        ours: Any = LoRAEmbedding(nn.Embedding(OUT, IN), CONFIG, mx.random.key(0))
        train(ours)
        theirs = Theirs.from_base(ours.base, r=RANK, scale=ours.scale)
        theirs.load_weights([("lora_a", ours.lora_a), ("lora_b", ours.lora_b)], strict=False)
        ids, x = mx.array([[1, 2, 90]]), inputs(3, IN)
        np.testing.assert_allclose(array(ours(ids)), array(theirs(ids)), atol=2e-5)
        assert np.abs(array(ours.as_linear(x)) - array(theirs.as_linear(x))).max() > 0.1


def test_the_kinds() -> None:
    assert type(layer_of("lora")) is LoRALinear
    assert type(layer_of("dora")) is DoRALinear
