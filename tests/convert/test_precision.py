"""What a weight becomes at each precision, against numpy and MLX's own quantization."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from openelm_mlx.config import OpenELMConfig
from openelm_mlx.convert import precision as module
from openelm_mlx.convert.choices import GROUP_SIZES, check_precision
from openelm_mlx.convert.job import convert
from openelm_mlx.convert.precision import plan_precision
from openelm_mlx.errors import CheckpointError, OpenELMError
from openelm_mlx.layer_paths import grouped
from openelm_mlx.loading import load_model
from openelm_mlx.progress import Progress
from tests.support import sources
from tests.support.sources import Array, written
from tests.support.torch_writer import bf16

WEIGHTS = sources.weights(sources.config())
DTYPES = {"bf16": mx.bfloat16, "fp16": mx.float16, "fp32": mx.float32}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sources.hf(tmp_path_factory.mktemp("source") / "hf", tokenizer=False)


def made(source: Path, out: Path, precision: str, **options: Any) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """The tensors and the config.json of a conversion."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "float16")
        folder = convert(source, out, precision=precision, tokenizer="none", **options).folder
    return written(folder), json.loads((folder / "config.json").read_text())


def numpy_of(x: mx.array) -> Array:
    return np.asarray(x.view(mx.uint16)) if x.dtype == mx.bfloat16 else np.asarray(x)


@pytest.mark.parametrize("precision", DTYPES)
def test_full_precisions(source: Path, tmp_path: Path, precision: str) -> None:
    found, config = made(source, tmp_path / "out", precision)
    wanted = {"bf16": lambda x: bf16(x).bits, "fp16": lambda x: x.astype(np.float16), "fp32": lambda x: x}[precision]
    assert set(found) == set(WEIGHTS)
    for name, x in WEIGHTS.items():
        assert found[name].dtype == DTYPES[precision]
        np.testing.assert_array_equal(numpy_of(found[name]), wanted(x))
    assert "quantization" not in config
    assert config["torch_dtype"] == {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[precision]
    assert config["openelm_mlx"]["precision"] == precision


def test_bfloat16_rounds_to_nearest_and_ties_to_even(tmp_path: Path) -> None:
    """Ties, the largest finite values, subnormals and signed zeros."""
    bits = np.arange(0x3F80_0000, 0x3F80_0000 + 64 * 0x1000, 0x1000, dtype=np.uint32)
    edge = [0x3F80_8000, 0x3F81_8000, 0x3F80_7FFF, 0x3F80_8001, 0xBF80_8000, 0x0000_8000, 0x0001_8000, 0x8000_0000]
    edge += [0x7F7F_0000, 0xFF7F_0000, 0x0080_0000]
    bits[: len(edge)] = edge
    tensors = {**WEIGHTS, "transformer.norm.weight": bits.view(np.float32)}
    found, _ = made(sources.hf(tmp_path / "hf", tensors), tmp_path / "out", "bf16")
    wide = bits.astype(np.uint64)
    nearest = ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype(np.uint16)
    np.testing.assert_array_equal(numpy_of(found["transformer.norm.weight"]), nearest)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_packed_precisions(source: Path, tmp_path: Path, bits: int, group_size: int) -> None:
    found, config = made(source, tmp_path / "out", f"{bits}bit", group_size=group_size)
    entry = config["quantization"]
    assert (entry["bits"], entry["group_size"], entry["mode"]) == (bits, group_size, "affine")
    for name, x in WEIGHTS.items():
        path = name.removesuffix(".weight")
        if x.ndim == 1 or x.shape[1] % group_size:
            np.testing.assert_array_equal(numpy_of(found[name]), bf16(x).bits)
            assert f"{path}.scales" not in found
            assert entry.get(path) is (False if x.ndim == 2 else None)
            continue
        assert path not in entry
        assert found[f"{path}.scales"].dtype == found[f"{path}.biases"].dtype == mx.bfloat16
        how: dict[str, Any] = {"group_size": group_size, "bits": bits}
        theirs = [a.astype(mx.bfloat16) if a.dtype == mx.float32 else a for a in mx.quantize(mx.array(x), **how)]
        ours = [found[f"{path}.{part}"] for part in ("weight", "scales", "biases")]
        error, plain_error = (
            float(mx.square(mx.dequantize(*arrays, **how).astype(mx.float32) - mx.array(x)).mean())  # type: ignore[arg-type]
            for arrays in (ours, theirs)
        )
        assert error <= plain_error * 1.0001, "worse than MLX's own"
        assert error > plain_error / 10, "better than 4 or 8 bits can be: these are other weights"


def test_which_layers_stay_is_recorded_and_said_once_a_kind(source: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    _, config = made(source, tmp_path / "out", "4bit", group_size=64, progress=Progress(say=lines.append))
    kept = ["transformer.layers.0.attn.out_proj"]  # 2 heads of 16; all other widths are 64 or 128
    assert [path for path, value in config["quantization"].items() if value is False] == kept
    assert lines == ["kept in full precision: layer 0 attn.out_proj (width is no multiple of group size 64)"]


def test_a_large_model_needs_few_lines(tmp_path: Path) -> None:
    config = OpenELMConfig.from_dict(sources.config(num_transformer_layers=30, qkv_multipliers=1.0, model_dim=96))
    plan = plan_precision(config, "4bit", 64)
    assert len(plan.kept) == 30 * 3 + 1 + sum(f % 64 > 0 for f in config.ffn_dims)
    assert len(grouped(plan.kept)) <= 5


def test_grouped_names() -> None:
    paths = ["transformer.token_embeddings", "lm_head"]
    paths += [f"transformer.layers.{n}.attn.qkv_proj" for n in (10, 0, 1, 2, 5, 7, 8)]
    paths += ["transformer.layers.3.ffn.proj_1", "layers.4.ffn.proj_1"]
    assert grouped(paths) == [
        "transformer.token_embeddings",
        "lm_head",
        "layers 0-2, 5, 7-8, 10 attn.qkv_proj",
        "layers 3-4 ffn.proj_1",
    ]
    assert grouped([]) == []


def test_lists_are_written_out(source: Path, tmp_path: Path) -> None:
    _, config = made(source, tmp_path / "out", "bf16")
    assert config["num_query_heads"] == [2, 4]
    assert config["num_kv_heads"] == [1, 2]
    assert config["ffn_multipliers"] == [1.0, 2.0]
    assert config["qkv_multipliers"] == [0.5, 1.0]
    assert config["model_type"] == "openelm"
    pt = sources.corenet(tmp_path / "run", num_transformer_layers=2)
    out = convert(pt, tmp_path / "corenet", tokenizer="none").folder
    assert json.loads((out / "config.json").read_text())["num_query_heads"] == [2, 4]


def test_a_packed_model_computes_nearly_the_same(source: Path, tmp_path: Path) -> None:
    ids = mx.array([[1, 17, 400, 33, 5]])
    logits = {}
    for precision in ("fp32", "8bit", "4bit"):
        made(source, tmp_path / precision, precision, group_size=32)
        logits[precision] = load_model(tmp_path / precision)(ids)
    spread = float(mx.abs(logits["fp32"]).max())
    error = {p: float(mx.abs(logits[p] - logits["fp32"]).max()) / spread for p in ("8bit", "4bit")}
    assert 0 < error["8bit"] < 0.05
    assert error["8bit"] < error["4bit"] < 0.5


def test_stock_mlx_lm_loads_a_folder_with_kept_layers(tmp_path: Path) -> None:
    """Group size 64 does not divide every width, so that single layers are in full precision."""
    from mlx_lm.utils import load_model as mlx_lm_load

    source = sources.hf(tmp_path / "hf", qkv_multipliers=[0.5, 1.0])
    out = convert(source, tmp_path / "out", precision="4bit").folder
    ids = mx.array([[1, 17, 400, 33, 5]])
    theirs, config = mlx_lm_load(out)
    assert config["quantization"]["transformer.layers.0.attn.out_proj"] is False
    theirs.set_dtype(mx.float32)  # their bfloat16 and ours round at different places
    np.testing.assert_allclose(np.asarray(load_model(out)(ids)), np.asarray(theirs(ids)), atol=1e-4)


def test_a_tensor_converted_in_blocks_is_the_same(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for precision in ("bf16", "4bit"):
        whole, _ = made(source, tmp_path / precision, precision, group_size=32)
        for block in (200, 5000):
            monkeypatch.setattr(module, "_BLOCK", block)
            parts, _ = made(source, tmp_path / f"{precision}-{block}", precision, group_size=32)
            assert set(parts) == set(whole)
            assert all(mx.array_equal(parts[n], whole[n]) for n in whole)


def test_progress_counts_every_byte_of_the_source(source: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    total = sum(x.nbytes for x in WEIGHTS.values())
    for precision in ("bf16", "4bit"):
        seen.clear()
        made(source, tmp_path / precision, precision, progress=Progress(bytes_read=lambda *x: seen.append(x)))
        done = [d for d, _ in seen]
        assert {t for _, t in seen} == {total}
        assert done[0] == 0
        assert done[-1] == total
        assert done == sorted(done)
        assert len(done) == len(WEIGHTS) + 1


# What is refused.


def test_names_that_are_not_known() -> None:
    with pytest.raises(OpenELMError, match="precision '5bit' is not known; use one of bf16, fp16, fp32, 4bit, 8bit"):
        check_precision("5bit", 64)
    for name in ("4bit", "bf16"):
        with pytest.raises(OpenELMError, match="group size 48 is not known; use one of 32, 64, 128"):
            check_precision(name, 48)


def test_they_are_refused_before_the_source_is_looked_for(tmp_path: Path) -> None:
    with pytest.raises(OpenELMError, match="precision '5bit'"):
        convert("no/such", tmp_path / "out", precision="5bit")
    with pytest.raises(OpenELMError, match="group size 48"):
        convert("no/such", tmp_path / "out", group_size=48)
    (tmp_path / "there").mkdir()
    with pytest.raises(OpenELMError, match="exists already"):
        convert("no/such", tmp_path / "there")


def test_float16_is_refused_for_the_3b_and_warned_about_elsewhere() -> None:
    with pytest.raises(OpenELMError, match=r"width 3072 \(OpenELM-3B\) in float16 overflows.*Use bf16"):
        plan_precision(OpenELMConfig.preset("OpenELM-3B"), "fp16", 64)
    with pytest.warns(UserWarning, match="prefer bf16"):
        assert plan_precision(OpenELMConfig.preset("OpenELM-1_1B"), "fp16", 64).dtype == mx.float16


def test_a_group_size_that_fits_nowhere(tmp_path: Path) -> None:
    config = OpenELMConfig.from_dict(sources.config(model_dim=48, head_dim=12, ffn_multipliers=1.0))
    with pytest.raises(OpenELMError, match="group size 64 divides the width of no layer"):
        plan_precision(config, "8bit", 64)


@pytest.mark.parametrize("precision", ["4bit", "fp16"])
def test_a_weight_that_does_not_fit_is_named(tmp_path: Path, precision: str) -> None:
    x = WEIGHTS["transformer.layers.1.ffn.proj_2.weight"].copy()
    x[3, 5] = np.inf if precision == "4bit" else 70_000
    source = sources.hf(tmp_path / "hf", {**WEIGHTS, "transformer.layers.1.ffn.proj_2.weight": x})
    with pytest.raises(CheckpointError, match=r"^tensor transformer.layers.1.ffn.proj_2.weight, from row 0 on: "):
        made(source, tmp_path / "out", precision)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("precision", ["bf16", "fp32", "4bit"])
def test_infinity_and_nan_of_the_source_are_refused(tmp_path: Path, precision: str, bad: float) -> None:
    x = np.ones(64, np.float32)
    x[3] = bad
    source = sources.hf(tmp_path / "hf", {**WEIGHTS, "transformer.norm.weight": x})
    with pytest.raises(CheckpointError, match=r"tensor transformer.norm.weight, .* it has NaN or infinity"):
        made(source, tmp_path / "out", precision)
    assert not (tmp_path / "out").exists()
