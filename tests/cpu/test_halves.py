"""Weights that stay in bfloat16 on a CPU: the same products as in float32, in half the memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from openelm_mlx import device
from openelm_mlx.cache import make_cache
from openelm_mlx.cpu import blas, halves
from openelm_mlx.generation import generate_tokens
from openelm_mlx.loading import load_model
from tests.support.models import GLU_CASES, converted_folder

pytestmark = pytest.mark.skipif(
    device.backend() != "cpu" or blas.bfloat16_alpha is None, reason="needs the compiled fast path"
)
PROMPT = [3, 141, 59, 26, 53, 58, 97, 93, 23, 84]


def random(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def exact(x: mx.array, weight: mx.array) -> Any:
    return np.asarray(x, np.float64) @ np.asarray(weight.astype(mx.float32), np.float64).T


class TestProduct:
    # Few rows are computed by our own kernel, many by OpenBLAS, and short ones one number at a time.
    @pytest.mark.parametrize("rows", [1, 2, 3, 5, 6, 7, 13, 47, 48, 49, 100])
    @pytest.mark.parametrize(("outputs", "width"), [(300, 64), (8, 257), (4, 4), (34, 31), (1000, 512)])
    def test_it_is_that_of_float32(self, rows: int, outputs: int, width: int) -> None:
        x, weight = random(1, rows, width), random(outputs, width, seed=1).astype(mx.bfloat16)
        found = halves.multiply(x, weight)
        assert found.shape == (1, rows, outputs) and found.dtype == mx.float32
        np.testing.assert_allclose(np.asarray(found), exact(x, weight), atol=2e-6 * width)

    def test_a_large_one_uses_all_threads(self) -> None:
        x, weight = random(2, 3, 1280), random(4096, 1280, seed=1).astype(mx.bfloat16)
        np.testing.assert_allclose(np.asarray(halves.multiply(x, weight)), exact(x, weight), atol=1e-3)

    def test_views_of_larger_arrays(self) -> None:
        x, weight = random(4, 2, 128)[::2, :, 32:96], random(90, 64, seed=1).astype(mx.bfloat16)[10:50]
        np.testing.assert_allclose(np.asarray(halves.multiply(x, weight)), exact(x, weight), atol=1e-4)

    def test_special_values_come_through(self) -> None:
        x = mx.ones((1, 64))
        weight = mx.ones((4, 64), mx.bfloat16)
        weight[1, 3], weight[2, 0], weight[3, 63] = mx.inf, mx.nan, -mx.inf
        found = np.asarray(halves.multiply(x, weight))[0]
        assert found[0] == 64 and found[1] == np.inf and np.isnan(found[2]) and found[3] == -np.inf

    def test_the_same_bits_every_time(self) -> None:
        x, weight = random(1, 1, 1280), random(2000, 1280, seed=1).astype(mx.bfloat16)
        first = halves.multiply(x, weight)
        assert all(mx.array_equal(halves.multiply(x, weight + 0), first).item() for _ in range(20))

    def test_it_has_no_gradient_rather_than_a_wrong_one(self) -> None:
        x, weight = random(2, 5, 64), random(30, 64, seed=1).astype(mx.bfloat16)
        for which in (0, 1):
            with pytest.raises(ValueError, match="Not implemented"):
                mx.eval(mx.grad(lambda x, w: halves.multiply(x, w).sum(), argnums=which)(x, weight))


class TestModels:
    @pytest.fixture(scope="class", params=[*GLU_CASES, "tiny-no-glu"])
    @staticmethod
    def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return converted_folder(tmp_path_factory.mktemp("half") / "model", "bf16", case=request.param)

    def test_matrices_stay(self, folder: Path) -> None:
        model = load_model(folder)
        matrices = [layer for _, layer in model.named_modules() if isinstance(layer, (nn.Linear, nn.Embedding))]
        assert matrices and all(isinstance(layer, halves.KINDS) for layer in matrices)
        assert all(layer.weight.dtype == mx.bfloat16 for layer in matrices)

    def test_logits_are_those_of_float32(self, folder: Path) -> None:
        kept, cast = load_model(folder), load_model(folder, dtype="float32")
        assert not any(isinstance(layer, halves.KINDS) for layer in cast.modules())
        ids = mx.array([PROMPT, PROMPT[::-1]])
        assert float(mx.abs(kept(ids) - cast(ids)).max()) < 2e-5
        cache = make_cache(kept)
        steps = mx.concatenate([kept(ids[:, i : i + 1], cache=cache) for i in range(len(PROMPT))], axis=1)
        assert float(mx.abs(steps - cast(ids)).max()) < 2e-5

    def test_the_same_tokens(self, folder: Path) -> None:
        tokens = [list(generate_tokens(load_model(folder, dtype=d), PROMPT, 20)) for d in (None, "float32")]
        assert tokens[0] == tokens[1] and len(tokens[0]) > 1

    def test_gradients_in_training_are_those_of_float32(self, folder: Path) -> None:
        ids = mx.array([PROMPT])

        def gradients(dtype: str | None) -> dict[str, mx.array]:
            model = load_model(folder, dtype=dtype)
            model.train()

            def loss(model: Any) -> mx.array:
                return nn.losses.cross_entropy(model(ids[:, :-1]), ids[:, 1:]).mean()

            found: Any = tree_flatten(nn.value_and_grad(model, loss)(model)[1])
            return dict(found)

        kept, cast = gradients(None), gradients("float32")
        for name in ("transformer.layers.0.attn_norm.weight", "transformer.layers.1.ffn.proj_2.weight"):
            assert float(mx.abs(cast[name]).max()) > 1e-4
            np.testing.assert_allclose(np.asarray(kept[name].astype(mx.float32)), np.asarray(cast[name]), atol=1e-3)

    def test_a_dtype_that_is_asked_for_is_given(self, folder: Path) -> None:
        for name, dtype in (("float32", mx.float32), ("bfloat16", mx.bfloat16)):
            model = load_model(folder, dtype=name)
            parameters: Any = tree_flatten(model.parameters())
            assert {p.dtype for _, p in parameters} == {dtype}


def test_what_is_not_bfloat16_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(8, 4, bias=False), nn.Linear(4, 4), nn.Linear(4, 5, bias=False), nn.Linear(2, 1))
    model.layers[1].set_dtype(mx.bfloat16)  # has a bias
    model.layers[2].set_dtype(mx.bfloat16)  # an odd number of rows is no pairs
    model.layers[3] = nn.Linear(4, 2, bias=False)
    model.layers[3].set_dtype(mx.bfloat16)  # one pair of rows
    halves.keep(model)
    assert [type(layer) for layer in model.layers] == [nn.Linear] * 4


def test_without_the_fast_path_nothing_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = converted_folder(tmp_path / "model", "bf16")
    monkeypatch.setattr(blas, "bfloat16_alpha", None)
    assert not any(isinstance(layer, halves.KINDS) for layer in load_model(folder).modules())
