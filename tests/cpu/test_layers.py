"""The layers made for a CPU: the plain model's logits and gradients, with every kind of cache and within mlx-lm."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from mlx.utils import tree_flatten, tree_map

from openelm_mlx import device
from openelm_mlx.cache import make_cache
from openelm_mlx.cpu import blas, halves, ops
from openelm_mlx.cpu.layers import CpuAttention, CpuFeedForward, speed_up
from openelm_mlx.loading import load_model, parameter_shapes
from openelm_mlx.model import OpenELM
from tests import test_model
from tests.support.models import GLU_CASES, converted_folder, golden_config, golden_model
from tests.test_model import PROMPT, distance, mlx_lm, run, tokenizer, whole

pytestmark = pytest.mark.skipif(device.backend() != "cpu", reason="made for the CPU backend")

__all__ = ["mlx_lm", "tokenizer"]  # fixtures

CASES = [*GLU_CASES, "tiny-no-glu"]


def fast_model(case: str, seed: int = 0) -> OpenELM:
    model = golden_model(case, seed)
    speed_up(model)
    model.eval()
    return model


def pair(case: str) -> tuple[OpenELM, OpenELM]:
    """The plain model and the fast one."""
    plain = golden_model(case)
    plain.eval()
    return plain, fast_model(case)


class TestSpeedUp:
    @pytest.mark.parametrize("case", CASES)
    def test_names_and_shapes_stay(self, case: str) -> None:
        plain, fast = pair(case)
        assert parameter_shapes(fast) == parameter_shapes(plain)
        assert [n for n, _ in fast.named_modules()] == [n for n, _ in plain.named_modules()]
        assert all(type(x.attn) is CpuAttention and type(x.ffn) is CpuFeedForward for x in fast.layers)

    @pytest.mark.parametrize("precision", ["fp32", "bf16", "4bit"])
    def test_a_loaded_model_has_them(self, tmp_path: Path, precision: str) -> None:
        folder = converted_folder(tmp_path / "model", precision)
        for dtype, expected in ((None, True), ("float32", True), ("bfloat16", False)):
            model = load_model(folder, dtype=dtype)
            assert {isinstance(x.attn, CpuAttention) for x in model.layers} == {expected}
            assert {isinstance(x.ffn, CpuFeedForward) for x in model.layers} == {expected}

    @pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
    @pytest.mark.parametrize("case", CASES)
    def test_cast_later_it_is_the_plain_model(self, case: str, dtype: mx.Dtype) -> None:
        plain, fast = pair(case)
        for model in (plain, fast):
            model.set_dtype(dtype)
        a, b = (run(model, make_cache(model)) for model in (plain, fast))
        assert b.dtype == dtype
        assert mx.array_equal(a, b)


class TestLogits:
    @pytest.mark.parametrize("case", CASES)
    def test_whole_and_in_parts(self, case: str) -> None:
        plain, fast = pair(case)
        expected = whole(plain)
        assert distance(whole(fast), expected) <= 1e-5
        assert not mx.array_equal(whole(fast), expected), "computed otherwise"
        for chunks in ((1, 9, 1, 16, 1, 12), (1,) * 40, (39, 1), (20, 20)):
            assert distance(run(fast, make_cache(fast), chunks), expected) <= 1e-5

    @pytest.mark.parametrize("case", CASES)
    def test_beyond_the_window(self, case: str) -> None:
        """The table of angles grows, once the window is passed, at once or token by token."""
        models = []
        for _ in range(2):
            model = OpenELM(dataclasses.replace(golden_config(case), max_context_length=8))
            model.update(golden_model(case).parameters())
            model.eval()
            models.append(model)
        plain, fast = models
        speed_up(fast)
        expected = whole(plain)
        assert distance(run(fast, make_cache(fast), (6, *(1,) * 34)), expected) <= 1e-5
        speed_up(fast)
        assert distance(whole(fast), expected) <= 1e-5
        assert distance(whole(fast, PROMPT[:5]), whole(plain, PROMPT[:5])) <= 1e-5

    @pytest.mark.slow
    def test_far_positions(self) -> None:
        plain, fast = pair("tiny-tied")
        ids = mx.array([[(7 * n * n + 3) % 250 for n in range(2300)]])  # the window is 2048
        assert distance(fast(ids, logits_to_keep=200), plain(ids, logits_to_keep=200)) <= 3e-5

    @pytest.mark.parametrize("case", CASES)
    def test_rows(self, case: str) -> None:
        plain, fast = pair(case)
        rows = mx.array([PROMPT[:13], PROMPT[13:26], PROMPT[20:33]])
        assert distance(fast(rows), plain(rows)) <= 1e-5
        cache = make_cache(fast)
        parts = [fast(rows[:, a:b], cache=cache) for a, b in ((0, 5), (5, 6), (6, 13))]
        assert distance(mx.concatenate(parts, axis=1), plain(rows)) <= 1e-5

    @pytest.mark.parametrize("case", CASES)
    def test_masks_that_are_arrays(self, case: str) -> None:
        class Masking:
            """A cache that gives every mask as an array, here of a window of three tokens."""

            def __init__(self, cache: Any) -> None:
                self.cache = cache
                self.update_and_fetch = cache.update_and_fetch

            @property
            def offset(self) -> int:
                return int(self.cache.offset)

            def make_mask(self, length: int, **_: Any) -> Any:
                return self.cache.make_mask(length, return_array=True, window_size=3)

        plain, fast = pair(case)
        ours, theirs = (run(model, [Masking(c) for c in make_cache(model)]) for model in (fast, plain))
        assert distance(ours, theirs) <= 1e-5
        assert distance(ours, whole(plain)) > 1e-3, "the mask matters"

    @pytest.mark.parametrize("case", CASES)
    def test_compiled(self, case: str) -> None:
        plain, fast = pair(case)
        compiled = mx.compile(lambda ids: fast(ids))
        for prompt in (PROMPT[:9], PROMPT[9:18], PROMPT[:1]):  # each length is traced anew
            assert distance(compiled(mx.array([prompt])), whole(plain, prompt)) <= 1e-5

    def test_angles_are_not_worked_out_again(self) -> None:
        plain, fast = pair("tiny-tied")

        def graph(model: OpenELM) -> str:
            text = io.StringIO()
            mx.export_to_dot(text, model(mx.array([PROMPT])))
            return text.getvalue()

        assert "RoPE" in graph(plain) or "Cos" in graph(plain)
        assert not any(name in graph(fast) for name in ("RoPE", "Cos", "Sin"))


class Fast:
    """The tests that this is mixed into find the fast model where they ask for the plain one."""

    @pytest.fixture(autouse=True)
    def fast(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(test_model, "golden_model", fast_model)

    def test_it_is_the_fast_one(self) -> None:
        found: Any = vars(test_model)["golden_model"]
        assert isinstance(found("tiny-tied").layers[0].attn, CpuAttention)


class TestAgainstMlxLm(Fast, test_model.TestAgainstMlxLm):
    pass


class TestCaches(Fast, test_model.TestCaches):
    pass


class TestLogitsToKeep(Fast, test_model.TestLogitsToKeep):
    pass


class TestMlxLmsGenerators(Fast, test_model.TestMlxLmsGenerators):
    pass


def loss_of(model: Any, ids: mx.array) -> mx.array:
    return nn.losses.cross_entropy(model(ids[:, :-1]), ids[:, 1:]).mean()


def dtypes(model: nn.Module) -> set[mx.Dtype]:
    flat: Any = tree_flatten(model.parameters())
    return {p.dtype for _, p in flat}


def gradients(model: OpenELM, ids: mx.array) -> dict[str, mx.array]:
    flat: Any = tree_flatten(nn.value_and_grad(model, loss_of)(model, ids)[1])
    return dict(flat)


class TestTraining:
    IDS = mx.array([PROMPT[:17], PROMPT[17:34]])

    @pytest.mark.parametrize("case", CASES)
    @pytest.mark.parametrize("training", [True, False])
    def test_every_gradient(self, case: str, training: bool) -> None:
        plain, fast = pair(case)
        for model in (plain, fast):
            model.train(training)
        assert distance(fast(self.IDS), plain(self.IDS)) <= 1e-5
        expected, found = gradients(plain, self.IDS), gradients(fast, self.IDS)
        assert found.keys() == expected.keys() == parameter_shapes(plain).keys()
        for name, gradient in expected.items():
            size = float(mx.abs(gradient).max())
            assert size > 1e-6, f"{name} takes part"
            assert distance(found[name], gradient) <= 1e-4 * size + 1e-7, name

    def test_what_mlx_cannot_compile_there_is_left_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = fast_model("tiny-tied")

        def compute(*_: Any, **__: Any) -> None:
            raise AssertionError("has a gradient of its own")

        for name in ("attention", "swiglu"):
            with monkeypatch.context() as changed:
                changed.setattr(ops, name, compute)
                with pytest.raises(AssertionError, match="of its own"):
                    model(self.IDS)
                model.train()
                model(self.IDS)
                model.eval()

    @pytest.mark.parametrize("precision", ["fp32", "bf16"])
    def test_lora_of_mlx_lm(self, tmp_path: Path, precision: str) -> None:
        """As its trainer does it, in a compiled step."""
        utils = import_module("mlx_lm.tuner.utils")
        model = load_model(converted_folder(tmp_path / "model", precision))
        before = model(self.IDS)
        model.freeze()
        mx.random.seed(0)
        keys = {"attn.qkv_proj", "attn.out_proj", "ffn.proj_1", "ffn.proj_2"}
        utils.linear_to_lora_layers(model, len(model.layers), {"rank": 4, "scale": 4.0, "dropout": 0.0, "keys": keys})
        names = [n for n in dict(tree_flatten(model.trainable_parameters())) if n.endswith("lora_a")]
        assert len(names) == 4 * len(model.layers)
        assert distance(model(self.IDS), before) <= 1e-5, "nothing learned yet"
        optimizer = optim.Adam(learning_rate=1e-3)
        model.train()
        state = [model.state, optimizer.state]

        def step(ids: mx.array) -> mx.array:
            loss, gradient = nn.value_and_grad(model, loss_of)(model, ids)
            optimizer.update(model, gradient)
            return loss

        run_step: Any = mx.compile(step, inputs=state, outputs=state)
        losses = []
        for _ in range(20):
            losses.append(float(run_step(self.IDS)))
            mx.eval(state)
        assert losses[-1] < 0.7 * losses[0], losses
        model.eval()
        assert float(loss_of(model, self.IDS)) < losses[-1] * 1.05, "what was learned is used"

    def test_a_compiled_step_is_the_plain_one(self) -> None:
        """All weights trained, three steps: both models end with the same ones."""
        ends = []
        for model in pair("tiny-tied"):
            model.train()
            optimizer = optim.SGD(learning_rate=0.1)
            state = [model.state, optimizer.state]

            def step(ids: mx.array, model: Any = model, optimizer: Any = optimizer) -> mx.array:
                loss, gradient = nn.value_and_grad(model, loss_of)(model, ids)
                optimizer.update(model, gradient)
                return loss

            compiled: Any = mx.compile(step, inputs=state, outputs=state)
            for _ in range(3):
                mx.eval(compiled(self.IDS), state)
            ends.append(model.parameters())
        flat: Sequence[Any] = [tree_flatten(end) for end in ends]
        started: Any = dict(tree_flatten(golden_model("tiny-tied").parameters()))
        for (name, a), (_, b) in zip(*flat, strict=True):
            assert distance(a, b) <= 1e-5, name
            assert not mx.array_equal(a, started[name]), name


@pytest.mark.skipif(blas.bfloat16_alpha is None, reason="needs the compiled fast path")
class TestBfloat16Weights:
    def test_cast_later(self, tmp_path: Path) -> None:
        """The products then are those of the weights as they are."""
        folder = converted_folder(tmp_path / "model", "bf16")
        expected = whole(load_model(folder))
        for dtype in (mx.float32, mx.float16):
            model = load_model(folder)
            model.set_dtype(dtype)
            assert distance(whole(model), expected) <= (1e-5 if dtype == mx.float32 else 0.05)
            assert dtypes(model) == {dtype}

    def test_products_that_come_out_wrong_are_noticed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Here because our function is told another number than it listens to, as if MLX did not pass it on."""
        folder = converted_folder(tmp_path / "model", "bf16")
        expected = whole(load_model(folder))
        monkeypatch.setattr(blas, "bfloat16_alpha", 1.5)
        assert not halves.possible()
        model = load_model(folder)
        assert dtypes(model) == {mx.float32}
        assert distance(whole(model), expected) <= 1e-5


def test_tree_map_copies_are_models_of_their_own() -> None:
    """What mlx-lm's tools do with parameters does not reach the angles."""
    fast = fast_model("tiny-tied")
    before = whole(fast)
    fast.update(tree_map(lambda x: x * 1, fast.parameters()))
    assert distance(whole(fast), before) <= 1e-6
