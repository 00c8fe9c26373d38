"""Packing weights, and model folders that go back and forth between this package and mlx-lm."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openelm_mlx import quantize
from openelm_mlx.convert.precision import plan_precision
from openelm_mlx.errors import CheckpointError, ConfigError
from openelm_mlx.loading import load_model, parameter_shapes
from openelm_mlx.model import OpenELM
from openelm_mlx.quantize import (
    Quantization,
    apply_config,
    dequantized,
    plan_to_config,
    quantizable,
    quantize_weight,
    uniform_plan,
)
from tests.support.models import GLU_CASES, converted_folder, golden_config, golden_model, greedy_reference
from tests.support.tokenizers_made import byte_level_folder

Array = npt.NDArray[np.float64]
SIZES = [(bits, group) for bits in (4, 8) for group in (32, 64, 128)]


def unpacked_by_hand(packed: tuple[mx.array, mx.array, mx.array], how: Quantization) -> Array:
    """levels * scale + bias in float64, the levels read out of the 32-bit words."""
    words, scales, biases = (np.asarray(a.astype(mx.float32) if a.dtype != mx.uint32 else a) for a in packed)
    shifts = np.arange(32 // how.bits, dtype=np.uint32) * np.uint32(how.bits)
    levels = (words[..., None] >> shifts) & np.uint32(2**how.bits - 1)
    levels = levels.reshape(words.shape[0], -1, how.group_size).astype(np.float64)
    whole = levels * scales[..., None].astype(np.float64) + biases[..., None].astype(np.float64)
    return whole.reshape(words.shape[0], -1)


def group_errors(weight: mx.array, packed: tuple[mx.array, mx.array, mx.array], how: Quantization) -> Array:
    """Squared error of each group."""
    x = np.asarray(weight.astype(mx.float32)).astype(np.float64)
    difference = unpacked_by_hand(packed, how) - x
    return (difference.reshape(x.shape[0], -1, how.group_size) ** 2).sum(-1)


def with_mlx(weight: mx.array, how: Quantization, dtype: mx.Dtype) -> tuple[mx.array, mx.array, mx.array]:
    """``mx.quantize``, with scales rounded to `dtype` as they are stored."""
    packed, scales, biases = mx.quantize(weight, how.group_size, how.bits)
    return packed, scales.astype(dtype), biases.astype(dtype)


def never_worse(weight: mx.array, how: Quantization, dtype: mx.Dtype) -> None:
    ours = group_errors(weight, quantize_weight(weight, how, dtype), how)
    theirs = group_errors(weight, with_mlx(weight, how, dtype), how)
    # The fit works in float32, this comparison in float64.
    x = np.asarray(weight.astype(mx.float32)).astype(np.float64).reshape(ours.shape[0], -1, how.group_size)
    slack = 1e-5 * theirs + how.group_size * (2e-7 * np.abs(x).max(-1)) ** 2
    assert (ours <= theirs + slack).all()


class TestPacking:
    @pytest.mark.parametrize(("bits", "group"), SIZES)
    @pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
    def test_mlx_unpacks_what_was_packed(self, bits: int, group: int, dtype: mx.Dtype) -> None:
        how, weight = Quantization(bits, group), mx.random.normal((7, 256), key=mx.random.key(0))
        packed, scales, biases = quantize_weight(weight, how, dtype)
        assert (packed.dtype, packed.shape) == (mx.uint32, (7, 256 * bits // 32))
        assert (scales.dtype, scales.shape) == (biases.dtype, biases.shape) == (dtype, (7, 256 // group))
        by_mlx = mx.dequantize(packed, scales.astype(mx.float32), biases.astype(mx.float32), group, bits)
        by_hand = unpacked_by_hand((packed, scales, biases), how)
        np.testing.assert_allclose(np.asarray(by_mlx), by_hand, atol=1e-5)
        worst = np.abs(by_hand - np.asarray(weight)).max()
        # A step of a range of seven standard deviations, and the rounding of a bfloat16 scale and bias.
        assert worst < 7 / (2**bits - 1) + 0.02

    @pytest.mark.parametrize(("bits", "group"), SIZES)
    def test_better_than_mlx_on_ordinary_weights(self, bits: int, group: int) -> None:
        how, weight = Quantization(bits, group), mx.random.normal((64, 256), key=mx.random.key(1)) * 0.02
        never_worse(weight, how, mx.bfloat16)
        ours, theirs = quantize_weight(weight, how, mx.bfloat16), with_mlx(weight, how, mx.bfloat16)
        ratio = group_errors(weight, ours, how).sum() / group_errors(weight, theirs, how).sum()
        assert ratio < (0.95 if bits == 4 else 1.0)

    @settings(max_examples=80)
    @given(st.data())
    def test_never_worse_than_mlx_in_any_group(self, data: st.DataObject) -> None:
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
        size = 10.0 ** data.draw(st.integers(-12, 9))
        shapes = {
            "normal": rng.normal(size=(2, 128)),
            "constant": np.full((2, 128), rng.normal()),
            "outlier": np.where(np.arange(128) == 5, 100, rng.normal(size=(2, 128))),
            "two values": rng.choice([-1.0, 1.0], size=(2, 128)),
            "positive": rng.exponential(size=(2, 128)) + 1,
            "mostly zero": rng.normal(size=(2, 128)) * (rng.random((2, 128)) < 0.05),
            "far from zero": 1000 + rng.normal(size=(2, 128)),
        }
        weight = mx.array((shapes[data.draw(st.sampled_from(sorted(shapes)))] * size).astype(np.float32))
        weight = weight.astype(data.draw(st.sampled_from([mx.float32, mx.bfloat16])))
        bits, group = data.draw(st.sampled_from(SIZES))
        never_worse(weight, Quantization(bits, group), data.draw(st.sampled_from([mx.float32, mx.bfloat16])))

    @pytest.mark.parametrize("value", [0.0, 0.3, -7.5, 1e-30, 1e20, -1e37])
    def test_a_constant_group_is_kept(self, value: float) -> None:
        how, weight = Quantization(4, 32), mx.full((1, 32), value)
        out = unpacked_by_hand(quantize_weight(weight, how, mx.float32), how)
        np.testing.assert_allclose(out, value, rtol=1e-5, atol=1e-7)

    def test_sixteen_evenly_spaced_values_are_exact(self) -> None:
        how, weight = Quantization(4, 32), mx.arange(32).reshape(1, 32) % 16 - 5
        out = unpacked_by_hand(quantize_weight(weight.astype(mx.float32), how, mx.bfloat16), how)
        np.testing.assert_array_equal(out, np.asarray(weight))

    def test_an_outlier_does_not_reach_other_groups(self) -> None:
        how, weight = Quantization(4, 32), np.array(mx.random.normal((3, 64), key=mx.random.key(2)))
        plain = unpacked_by_hand(quantize_weight(mx.array(weight), how, mx.bfloat16), how)
        weight[1, 40] = 1e4
        other = unpacked_by_hand(quantize_weight(mx.array(weight), how, mx.bfloat16), how)
        changed = np.ones((3, 64), bool)
        changed[1, 32:] = False
        np.testing.assert_array_equal(plain[changed], other[changed])

    def test_denormals_become_nearly_nothing(self) -> None:
        how, weight = Quantization(4, 32), mx.array(np.linspace(-1e-40, 1e-40, 32, dtype=np.float32)[None])
        assert np.abs(unpacked_by_hand(quantize_weight(weight, how, mx.bfloat16), how)).max() < 1e-6

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
    @pytest.mark.parametrize("column", [0, 31])
    def test_what_is_not_finite_is_refused(self, value: float, column: int) -> None:
        weight = np.ones((4, 32), np.float32)
        weight[2, column] = value
        with pytest.raises(CheckpointError, match="cannot be packed: in rows 0 to 3 it has NaN, infinity"):
            quantize_weight(mx.array(weight), Quantization(4, 32), mx.bfloat16)

    def test_scales_that_do_not_fit_are_refused(self) -> None:
        weight = mx.array(np.linspace(-3e38, 3e38, 32, dtype=np.float32)[None])
        with pytest.raises(CheckpointError, match="whose scale bfloat16 cannot hold"):
            quantize_weight(weight, Quantization(4, 32), mx.bfloat16)
        with pytest.raises(CheckpointError, match="whose scale float16 cannot hold"):
            quantize_weight(mx.array(np.linspace(0, 1e7, 32, dtype=np.float32)[None]), Quantization(4, 32), mx.float16)

    @pytest.mark.parametrize("rows", [1, 2, 3, 7])
    def test_blocks_make_no_difference(self, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
        how, weight = Quantization(4, 32), mx.random.normal((rows, 64), key=mx.random.key(3))
        whole = quantize_weight(weight, how, mx.bfloat16)
        monkeypatch.setattr(quantize, "_BLOCK", 3 * 64)
        for a, b in zip(whole, quantize_weight(weight, how, mx.bfloat16), strict=True):
            assert mx.array_equal(a, b)
        monkeypatch.setattr(quantize, "_BLOCK", 1)  # less than a row
        for a, b in zip(whole, quantize_weight(weight, how, mx.bfloat16), strict=True):
            assert mx.array_equal(a, b)

    @pytest.mark.parametrize("how", [Quantization(3, 32), Quantization(6, 64), Quantization(4, 32, "mxfp4")])
    def test_other_formats_are_not_packed_here(self, how: Quantization) -> None:
        with pytest.raises(ValueError, match="not packed here"):
            quantize_weight(mx.zeros((1, 64)), how, mx.bfloat16)


class TestPlans:
    def test_layers_whose_width_does_not_divide_are_kept(self) -> None:
        model = OpenELM(golden_config("tiny-tied"))
        plan = uniform_plan(model, Quantization(4, 128))
        assert set(plan) == set(quantizable(model))
        assert plan["transformer.layers.0.attn.out_proj"] is None  # two heads of 32
        kept = {path for path, q in plan.items() if q is None}
        widths = {name.removesuffix(".weight"): shape[-1] for name, shape in parameter_shapes(model).items()}
        assert kept == {path for path in plan if widths[path] % 128}
        assert kept != set(plan)
        assert not any("norm" in path for path in plan)

    def test_the_config_names_them(self) -> None:
        default, other = Quantization(4, 64), Quantization(8, 32)
        config = plan_to_config({"a.b": default, "c": None, "d": other}, default)
        assert config == {
            "group_size": 64,
            "bits": 4,
            "mode": "affine",
            "c": False,
            "d": {"bits": 8, "group_size": 32, "mode": "affine"},
        }
        json.dumps(config)

    def test_a_plan_through_the_config_and_back(self) -> None:
        config = golden_config("tiny-untied")
        default = Quantization(4, 32)
        plan = uniform_plan(OpenELM(config), default)
        plan["transformer.layers.1.ffn.proj_1"] = Quantization(8, 96 // 3)
        plan["lm_head"] = None
        model = OpenELM(config)
        apply_config(model, plan_to_config(plan, default), {f"{path}.scales" for path in plan})
        assert {path: layer_quantization(model, path) for path in plan} == plan


def layer_quantization(model: nn.Module, path: str) -> Quantization | None:
    layer = dict(model.named_modules())[path]
    packed = isinstance(layer, (nn.QuantizedLinear, nn.QuantizedEmbedding))
    return Quantization(layer.bits, layer.group_size, layer.mode) if packed else None


class TestApplyConfig:
    QKV = "transformer.layers.0.attn.qkv_proj"
    OUT = "transformer.layers.0.attn.out_proj"

    def apply(self, quantization: Any, *paths: str) -> OpenELM:
        model = OpenELM(golden_config("tiny-tied"))
        apply_config(model, quantization, {f"{path}.scales" for path in paths})
        return model

    def test_only_layers_with_scales_are_packed(self) -> None:
        model = self.apply({"group_size": 32, "bits": 4}, self.QKV)
        assert layer_quantization(model, self.QKV) == Quantization(4, 32)
        assert layer_quantization(model, self.OUT) is None

    @pytest.mark.parametrize("no", [False, None])
    def test_a_layers_own_no(self, no: object) -> None:
        model = self.apply({"group_size": 32, "bits": 4, self.QKV: no}, self.QKV, self.OUT)
        assert layer_quantization(model, self.QKV) is None
        assert layer_quantization(model, self.OUT) == Quantization(4, 32)

    def test_a_layers_own_settings(self) -> None:
        own = {"group_size": 64, "bits": 8}
        quantization = {"group_size": 32, "bits": 4, self.QKV: own, self.OUT: True}
        model = self.apply(quantization, self.QKV, self.OUT)
        assert layer_quantization(model, self.QKV) == Quantization(8, 64)
        assert layer_quantization(model, self.OUT) == Quantization(4, 32)
        assert own == {"group_size": 64, "bits": 8}

    @pytest.mark.parametrize("bad", [{"bits": 4}, {"group_size": 32}, {"bits": None, "group_size": 32}, 4, [4], "4bit"])
    def test_without_sizes(self, bad: Any) -> None:
        with pytest.raises(ConfigError, match="quantization has no bits and group_size"):
            self.apply(bad)

    @pytest.mark.parametrize(
        "bad",
        [
            {"group_size": 32, "bits": 7},
            {"group_size": 33, "bits": 4},
            {"group_size": 32, "bits": 4, "mode": "magic"},
            {"group_size": 32, "bits": 4, QKV: {"group_size": 32, "bits": 4, "colour": "red"}},
        ],
    )
    def test_what_mlx_cannot_hold(self, bad: dict[str, Any]) -> None:
        with pytest.raises(CheckpointError, match="cannot hold the checkpoint's quantization"):
            self.apply(bad, self.QKV)


class TestDequantized:
    @pytest.mark.parametrize("mode", ["affine", "mxfp4"])
    @pytest.mark.parametrize("kind", [nn.Linear, nn.Embedding])
    def test_same_values_in_a_plain_layer(self, mode: str, kind: type[nn.Module]) -> None:
        plain = nn.Linear(64, 5, bias=False) if kind is nn.Linear else nn.Embedding(5, 64)
        packed = plain.to_quantized(32, 4, mode=mode)
        out = dequantized(packed, mx.float32)
        assert type(out) is kind
        assert out.weight.dtype == mx.float32
        biases = packed.get("biases")
        expected = mx.dequantize(packed.weight, packed.scales, biases, 32, 4, mode=mode)
        assert mx.abs(out.weight - expected).max() < 1e-5
        ids = mx.array([[1, 4]])
        x = ids if kind is nn.Embedding else mx.random.normal((1, 3, 64), key=mx.random.key(0))
        assert mx.abs(out(x) - packed(x)).max() < 1e-4

    def test_other_layers_are_left_alone(self) -> None:
        layer = nn.RMSNorm(4)
        assert dequantized(layer, mx.float32) is layer


def mixed(path: str, layer: nn.Module) -> bool | dict[str, Any]:
    """A quantization with three widths, and layers left out."""
    if "out_proj" in path:
        return False
    return {"group_size": 32, "bits": 6 if "ffn" in path else 3, "mode": "affine"} if "layers.1." in path else True


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # mlx-lm leaves files open
class TestBothWaysWithMlxLm:
    PROMPT = (5, 300, 17, 99, 255, 42, 7, 7, 8)

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def sources(cls, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
        """Every precision of the GLU cases that this package writes, with a tokenizer (mlx-lm needs one)."""
        root = tmp_path_factory.mktemp("models")
        tokenizer = byte_level_folder(root / "tokenizer")
        return {
            precision: converted_folder(root / precision, precision, tokenizer=tokenizer)
            for precision in ("fp32", "bf16", "4bit", "8bit")
        }

    def stock(self, folder: Path) -> Any:
        model, *_ = import_module("mlx_lm").load(str(folder))
        model.set_dtype(mx.float32)
        return model

    def same(self, folder: Path) -> None:
        theirs, ours = self.stock(folder), load_model(folder, dtype="float32")
        ids = mx.array([self.PROMPT])
        assert mx.abs(theirs(ids) - ours(ids)).max() < 1e-4
        assert greedy_reference(ours, self.PROMPT, 12) == greedy_reference(theirs, self.PROMPT, 12)

    @pytest.mark.parametrize("precision", ["fp32", "bf16", "4bit", "8bit"])
    def test_written_here(self, sources: dict[str, Path], precision: str) -> None:
        self.same(sources[precision])

    def test_written_here_with_layers_left_out(self, tmp_path: Path) -> None:
        tokenizer = byte_level_folder(tmp_path / "tokenizer")
        folder = converted_folder(tmp_path / "m", "4bit", case="tiny-tied", group_size=128, tokenizer=tokenizer)
        quantization = json.loads((folder / "config.json").read_text())["quantization"]
        assert False in quantization.values()
        assert plan_precision(golden_config("tiny-tied"), "4bit", 128).kept
        self.same(folder)

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"dtype": "bfloat16"},
            {"quantize": True, "q_group_size": 32, "q_bits": 4},
            {"quantize": True, "q_group_size": 64, "q_bits": 8},
            {"quantize": True, "q_group_size": 32, "quant_predicate": mixed},
        ],
        ids=["plain", "bfloat16", "4 bits", "8 bits", "mixed bits"],
    )
    def test_written_by_mlx_lm(self, sources: dict[str, Path], tmp_path: Path, options: dict[str, Any]) -> None:
        import_module("mlx_lm").convert(str(sources["fp32"]), str(tmp_path / "theirs"), **options)
        self.same(tmp_path / "theirs")


def test_glu_cases_are_the_ones_mlx_lm_knows() -> None:
    assert all(golden_config(case).ffn_with_glu for case in GLU_CASES)
    assert golden_model("tiny-no-glu").config.ffn_with_glu is False
