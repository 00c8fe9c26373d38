"""Fused weights: as exact as their precision, whatever the base is stored in, and one tensor at a time."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from openelm_mlx.adapters import Adapter, AdapterError, adapters_of, attach_adapter
from openelm_mlx.adapters.fusing import Fusion
from openelm_mlx.convert.job import convert
from openelm_mlx.errors import CheckpointError
from openelm_mlx.loading import load_model
from openelm_mlx.model import OpenELM
from openelm_mlx.quantize import dequantized
from openelm_mlx.writer import write_weights
from tests.adapters.made import LINEARS_AND_EMBEDDING, array, logits, trained_adapter
from tests.support.models import converted_folder, golden_config, golden_model, hf_folder
from tests.support.sources import written

EMBEDDING, HEAD = "transformer.token_embeddings", "lm_head"
QKV = "transformer.layers.1.attn.qkv_proj"


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """tiny-tied by precision, and an unconverted one; read only."""
    root = tmp_path_factory.mktemp("bases")
    made = {p: converted_folder(root / p, p) for p in ("fp32", "bf16", "4bit", "8bit")}
    return made | {"unconverted": hf_folder(root / "hf"), "untied": converted_folder(root / "u", case="tiny-untied")}


@pytest.fixture(scope="module", params=["lora", "dora"])
def adapter(request: pytest.FixtureRequest) -> Adapter:
    """For tiny-tied: all linears and the embedding."""
    return trained_adapter(golden_model("tiny-tied"), method=request.param, targets=LINEARS_AND_EMBEDDING)


@pytest.fixture(scope="module")
def linears(adapter: Adapter) -> Adapter:
    """For tiny-tied: the linears of one layer."""
    return trained_adapter(golden_model("tiny-tied"), method=adapter.config.method, layers="1")


def fused(folder: Path, base: Path, adapter: Adapter, **options: Any) -> Fusion:
    """Write the fused model's weights and config."""
    fusion = Fusion(base, adapter, "adapter", **options)
    folder.mkdir()
    write_weights(folder, fusion.specs(), fusion.arrays())
    (folder / "config.json").write_text(json.dumps({**fusion.config_json(), "openelm_mlx": {}}))
    return fusion


def with_adapter(base: Path, adapter: Adapter) -> Any:
    model = load_model(base, dtype="float32")
    attach_adapter(model, adapter, "adapter")
    return model


@pytest.mark.parametrize("base", ["fp32", "bf16", "4bit", "8bit", "unconverted"])
def test_logits_in_float32(bases: dict[str, Path], adapter: Adapter, base: str, tmp_path: Path) -> None:
    fusion = fused(tmp_path / "out", bases[base], adapter, dtype=mx.float32)
    assert (fusion.precision, fusion.unties, fusion.config.share_input_output_layers) == ("fp32", True, False)
    model = load_model(tmp_path / "out")
    assert adapters_of(model) == {}
    np.testing.assert_allclose(logits(model), logits(with_adapter(bases[base], adapter)), atol=1e-4)
    assert np.abs(logits(model) - logits(load_model(bases[base], dtype="float32"))).max() > 0.1
    again = load_model(bases[base], dtype="float32")
    head = dequantized(again.transformer.token_embeddings, mx.float32).weight
    assert mx.array_equal(model.lm_head.weight, head), "the head is the base's weight"


def test_an_untied_base_and_a_head_with_an_adapter(bases: dict[str, Path], tmp_path: Path) -> None:
    adapter = trained_adapter(golden_model("tiny-untied"), targets=("proj_2", "token_embeddings", "lm_head"))
    fusion = fused(tmp_path / "out", bases["untied"], adapter)
    assert (fusion.precision, fusion.unties) == ("fp32", False)
    model = load_model(tmp_path / "out")
    np.testing.assert_allclose(logits(model), logits(with_adapter(bases["untied"], adapter)), atol=1e-4)


@pytest.mark.parametrize(
    ("base", "precision"),
    [("fp32", "fp32"), ("bf16", "bf16"), ("4bit", "bf16"), ("8bit", "bf16"), ("unconverted", "fp32")],
)
def test_the_bases_precision_is_kept(
    bases: dict[str, Path], linears: Adapter, base: str, precision: str, tmp_path: Path
) -> None:
    fusion = fused(tmp_path / "out", bases[base], linears)
    assert (fusion.precision, fusion.unties) == (precision, False)
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert values["torch_dtype"] == {"fp32": "float32", "bf16": "bfloat16"}[precision]
    assert "quantization" not in values
    tensors = written(tmp_path / "out")
    assert {t.dtype for t in tensors.values()} == {mx.float32 if precision == "fp32" else mx.bfloat16}
    for name, value in with_adapter(bases[base], linears).named_modules():
        if name in linears.paths:  # each weight is rounded once
            exact = value.fused_weight().astype(tensors[f"{name}.weight"].dtype)
            np.testing.assert_allclose(array(tensors[f"{name}.weight"]), array(exact), rtol=8e-3, atol=1e-6)


def test_what_has_no_adapter_stays_bit_for_bit(bases: dict[str, Path], linears: Adapter, tmp_path: Path) -> None:
    for base in ("bf16", "4bit"):
        fused(tmp_path / base, bases[base], linears, requantize=base == "4bit")
        before, after = written(bases[base]), written(tmp_path / base)
        assert list(before) == list(after) or before.keys() == after.keys()
        changed = {n.rpartition(".")[0] for n in before if not mx.array_equal(before[n], after[n], equal_nan=True)}
        assert changed == set(linears.paths)


@pytest.mark.parametrize("base", ["4bit", "8bit"])
def test_packed_again(bases: dict[str, Path], adapter: Adapter, base: str, tmp_path: Path) -> None:
    fusion = fused(tmp_path / "out", bases[base], adapter, requantize=True)
    assert fusion.precision == base
    before, after = written(bases[base]), written(tmp_path / "out")
    kinds = {name: (t.dtype, t.shape) for name, t in before.items()}
    head = {n.replace(EMBEDDING, HEAD): kind for n, kind in kinds.items() if n.startswith(EMBEDDING)}
    assert {name: (t.dtype, t.shape) for name, t in after.items()} == kinds | head
    for part in ("weight", "scales", "biases"):
        assert mx.array_equal(after[f"{HEAD}.{part}"], before[f"{EMBEDDING}.{part}"])
    config = json.loads((bases[base] / "config.json").read_text())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization"] == config["quantization"]
    layers = dict(with_adapter(bases[base], adapter).named_modules())
    bits = int(base[0])
    for path in (QKV, EMBEDDING):
        exact = layers[path].fused_weight()
        written_ = tuple(after[f"{path}.{part}"] for part in ("weight", "scales", "biases"))
        mlx: Any = mx.quantize(exact.astype(mx.bfloat16), 32, bits)
        ours, theirs = (
            float(mx.square(mx.dequantize(w, s, b, 32, bits).astype(mx.float32) - exact).mean())
            for w, s, b in (written_, mlx)
        )
        assert 0 < ours < theirs
    model = load_model(tmp_path / "out", dtype="float32")
    assert np.isfinite(logits(model)).all()


def test_own_plans_of_layers_go_along(bases: dict[str, Path], adapter: Adapter, tmp_path: Path) -> None:
    """The embedding in 8 bits, one layer in none: as mlx-lm mixes them."""
    folder = convert(bases["unconverted"], tmp_path / "mixed", precision="4bit", group_size=32, tokenizer="none").folder
    eight, plain = written(bases["8bit"]), written(bases["bf16"])
    tensors = written(folder)
    mx.eval(tensors)
    tensors |= {n: t for n, t in eight.items() if n.startswith(f"{EMBEDDING}.")}
    tensors = {n: t for n, t in tensors.items() if not n.startswith(f"{QKV}.")}
    tensors |= {f"{QKV}.weight": plain[f"{QKV}.weight"]}
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    (folder / "model.safetensors.index.json").unlink()
    values = json.loads((folder / "config.json").read_text())
    own = {EMBEDDING: {"bits": 8, "group_size": 32, "mode": "affine"}, QKV: False}
    (folder / "config.json").write_text(json.dumps(values | {"quantization": values["quantization"] | own}))
    fused(tmp_path / "out", folder, adapter, requantize=True)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization"][HEAD] == own[EMBEDDING]
    after = written(tmp_path / "out")
    assert after[f"{QKV}.weight"].dtype == mx.bfloat16
    layers = dict(with_adapter(folder, adapter).named_modules())
    np.testing.assert_allclose(array(after[f"{QKV}.weight"]), array(layers[QKV].fused_weight()), rtol=8e-3, atol=1e-6)
    assert np.isfinite(logits(load_model(tmp_path / "out"))).all()


def test_nothing_to_pack_again(bases: dict[str, Path], linears: Adapter) -> None:
    with pytest.raises(AdapterError, match="is not packed, so there is nothing to pack again; leave --requantize out"):
        Fusion(bases["bf16"], linears, "adapter", requantize=True)


def test_packings_that_are_not_made_here(bases: dict[str, Path], linears: Adapter, tmp_path: Path) -> None:
    folder = tmp_path / "mxfp4"
    folder.mkdir()
    model = load_model(bases["fp32"])
    nn.quantize(model, 32, 4, mode="mxfp4")
    tensors: Any = tree_flatten(model.parameters())
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tensors))
    values = json.loads((bases["fp32"] / "config.json").read_text())
    values["quantization"] = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(AdapterError, match=r"layers of 4 bits \(mxfp4\) cannot be packed again here"):
        Fusion(folder, linears, "adapter", requantize=True)
    fused(tmp_path / "out", folder, linears, dtype=mx.float32)
    expected = logits(with_adapter(folder, linears))
    np.testing.assert_allclose(logits(load_model(tmp_path / "out")), expected, atol=1e-4)


def test_an_adapter_that_does_not_fit(bases: dict[str, Path], linears: Adapter) -> None:
    with pytest.raises(AdapterError, match="run1: was trained on a model of another architecture"):
        Fusion(bases["untied"], linears, "run1")


def test_values_that_are_not_finite(bases: dict[str, Path], tmp_path: Path) -> None:
    adapter = trained_adapter(golden_model("tiny-tied"))
    adapter.tensors[f"{QKV}.lora_b"] = mx.full(adapter.tensors[f"{QKV}.lora_b"].shape, mx.nan)
    for n, (base, requantize) in enumerate((("fp32", False), ("4bit", True))):
        with pytest.raises(CheckpointError, match=rf"{QKV}\.weight: .*NaN"):
            fused(tmp_path / str(n), bases[base], adapter, requantize=requantize)
    adapter.tensors[f"{QKV}.lora_b"] = mx.full(adapter.tensors[f"{QKV}.lora_b"].shape, 1e7)
    with (
        pytest.warns(UserWarning, match="prefer bf16 for storing"),
        pytest.raises(CheckpointError, match="values that float16 cannot hold; use --precision bf16 or fp32"),
    ):
        fused(tmp_path / "half", bases["fp32"], adapter, dtype=mx.float16)


def test_progress_reaches_the_end(bases: dict[str, Path], adapter: Adapter) -> None:
    fusion = Fusion(bases["4bit"], adapter, "adapter")
    read: list[int] = []
    count = sum(1 for _ in fusion.arrays(read.append))
    assert count == len(fusion.specs())
    assert sum(read) == fusion.nbytes_read


def test_one_tensor_at_a_time(tmp_path: Path) -> None:
    deep = dataclasses.replace(
        golden_config("tiny-untied"),
        num_transformer_layers=24,
        qkv_multipliers=1.0,
        ffn_multipliers=2.0,
        num_query_heads=(),
        num_kv_heads=(),
    )
    model = OpenELM(deep)
    tensors: Any = tree_flatten(model.parameters())
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(tensors))
    (tmp_path / "config.json").write_text(json.dumps(deep.to_dict()))
    fusion = Fusion(tmp_path, trained_adapter(model, method="dora"), "adapter")
    del model, tensors
    specs = fusion.specs()
    largest, whole = max(s.nbytes for s in specs), sum(s.nbytes for s in specs)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for array_ in fusion.arrays():
        mx.eval(array_)
        del array_
    assert mx.get_peak_memory() - before < 5 * largest < whole / 4
