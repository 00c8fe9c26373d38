"""`openelm inspect`: the figures are right, and recorded facts are shown."""

from __future__ import annotations

import json
import sys
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openelm_mlx import device
from openelm_mlx.config import PRESETS
from tests.golden.checkpoints import BUNDLED
from tests.support import sources
from tests.support.cli import Done, environment, run, run_apart
from tests.support.tokenizers_made import MODEL

SCALING: dict[str, Any] = json.loads((BUNDLED / "layer_wise_scaling.json").read_text())
KEYS = {
    "name", "preset", "config", "layers", "parameters", "embedding_parameters", "bytes_by_precision",
    "kv_bytes_per_token", "stored_bytes", "stored_dtypes", "quantization", "provenance", "tokenizer", "runtime",
}  # fmt: skip


def converted(tmp_path: Path, *options: str) -> Path:
    source = sources.hf(tmp_path / "hf")
    done = run("convert", source, "--out", tmp_path / "out", "--quiet", *options)
    assert done.status == 0, done.err
    return tmp_path / "out"


def as_json(*arguments: str | Path) -> dict[str, Any]:
    done = run("inspect", *arguments, "--json")
    assert (done.status, done.err) == (0, "")
    values: dict[str, Any] = json.loads(done.out)
    return values


def value_of(done: Done, label: str) -> str:
    """What stands behind a label at the beginning of a line."""
    (line,) = [line for line in done.out.splitlines() if line.startswith(f"{label} ")]
    return line.removeprefix(label).strip()


# Sizes.


@pytest.mark.parametrize(
    ("preset", "case"),
    list(zip(PRESETS, ("openelm-270m", "openelm-450m", "openelm-1.1b", "openelm-3b"), strict=True)),
)
def test_the_presets_by_name(preset: str, case: str) -> None:
    """Against the table that Apple's own code produced."""
    expected = SCALING[case]
    values = as_json(preset)
    assert set(values) == KEYS
    assert (values["name"], values["preset"]) == (preset, preset)
    assert values["parameters"] == expected["parameters"]
    assert [x["query_heads"] for x in values["layers"]] == expected["num_query_heads"]
    assert [x["kv_heads"] for x in values["layers"]] == expected["num_kv_heads"]
    assert [x["ffn_dim"] for x in values["layers"]] == expected["ffn_dims"]
    config = values["config"]
    width, head = config["model_dim"], config["head_dim"]
    assert values["embedding_parameters"] == 32000 * width
    norm = width
    assert (
        sum(x["parameters"] for x in values["layers"]) + values["embedding_parameters"] + norm == expected["parameters"]
    )
    first = values["layers"][0]
    q, kv, ffn = first["query_heads"], first["kv_heads"], first["ffn_dim"]
    assert first["parameters"] == (2 * q + 2 * kv) * head * width + 3 * ffn * width + 2 * width + 2 * head
    assert values["kv_bytes_per_token"] == 2 * 2 * head * sum(expected["num_kv_heads"])
    assert values["bytes_by_precision"]["bf16"] == 2 * expected["parameters"]
    assert values["bytes_by_precision"]["fp32"] == 4 * expected["parameters"]
    assert (values["stored_bytes"], values["provenance"]) == (None, None)


def test_the_table(tmp_path: Path) -> None:
    done = run("inspect", sources.hf(tmp_path / "hf"))
    assert done.status == 0
    header, *rows = [line.split() for line in done.out.split("\n\n")[0].splitlines()]
    assert header == ["layer", "query", "heads", "kv", "heads", "FFN", "width", "parameters"]
    of_layer = [
        sum(prod(s) for n, s in sources.shapes(sources.config()).items() if f"layers.{i}." in n) for i in range(2)
    ]
    assert rows == [["0", "2", "1", "64", f"{of_layer[0]:,}"], ["1", "4", "2", "128", f"{of_layer[1]:,}"]]
    total = sum(map(prod, sources.shapes(sources.config()).values()))
    assert value_of(done, "parameters").startswith(f"{total:,} (32,000 in the embedding, tied")
    assert value_of(done, "dimensions") == "2 layers, width 64, heads of 16, vocabulary 500, window 64"
    assert value_of(done, "KV cache") == "192 bytes a token, 0.0 MB a full window (16 bits)"
    assert value_of(done, "quantization") == "none"
    assert value_of(done, "tokenizer") == "tokenizer.model"
    assert value_of(done, "runs on").startswith(device.backend())
    assert "converted " not in done.out


@pytest.mark.parametrize("precision", ["bf16", "4bit", "8bit"])
def test_the_bytes_at_a_precision_are_what_a_conversion_writes(tmp_path: Path, precision: str) -> None:
    before = as_json(sources.hf(tmp_path / "a" / "hf"))
    values = as_json(converted(tmp_path, "--precision", precision))
    assert values["stored_bytes"] == before["bytes_by_precision"][precision] == sum(values["stored_dtypes"].values())


def test_what_a_conversion_recorded(tmp_path: Path) -> None:
    out = converted(tmp_path, "--precision", "4bit", "--group-size", "64")
    values = as_json(out)
    assert values["quantization"]["transformer.layers.0.attn.out_proj"] is False
    assert values["provenance"]["precision"] == "4bit"
    assert set(values["stored_dtypes"]) == {"U32", "BF16"}
    done = run("inspect", out)
    assert value_of(done, "quantization") == "4 bits in groups of 64; in full precision: layer 0 attn.out_proj"
    origin = value_of(done, "converted")
    assert origin.startswith(f"from {tmp_path / 'hf'} (huggingface) to 4bit by openelm-mlx ")
    digest = values["provenance"]["source_sha256"]["model.safetensors"]
    assert f"{digest}  model.safetensors" in done.out
    assert value_of(done, "stored").endswith(" MB U32)")


def test_what_became_of_a_model_after_its_conversion(tmp_path: Path) -> None:
    out = converted(tmp_path, "--precision", "fp32")
    config = json.loads((out / "config.json").read_text())
    config["openelm_mlx"]["fused"] = [{"adapter": "run1", "method": "dora", "rank": 4}]
    (out / "config.json").write_text(json.dumps(config))
    assert value_of(run("inspect", out), "fused") == "with run1 (dora of rank 4)"
    config["openelm_mlx"] = {"source": "base", "source_kind": "finetune", "precision": "fp32", "tool_version": "1"}
    (out / "config.json").write_text(json.dumps(config))
    assert value_of(run("inspect", out), "fine-tuned") == "from base, all weights, in fp32 by openelm-mlx 1"


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    out = converted(tmp_path, "--tokenizer", "none")
    assert as_json(out)["tokenizer"] is None
    assert value_of(run("inspect", out), "tokenizer") == "none"


def test_where_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "backend", lambda: "cpu")
    monkeypatch.setattr(device, "blas", lambda: "a slow one")
    values = as_json("OpenELM-270M")
    assert values["runtime"] == {"backend": "cpu", "compute_dtype": "float32", "blas": "a slow one"}
    done = run("inspect", "OpenELM-270M")
    assert (value_of(done, "runs on"), value_of(done, "BLAS")) == ("cpu, computing in float32", "a slow one")
    monkeypatch.setattr(device, "backend", lambda: "metal")
    assert as_json("OpenELM-270M")["runtime"] == {"backend": "metal", "compute_dtype": "as stored", "blas": None}
    assert "BLAS" not in run("inspect", "OpenELM-270M").out


def test_names_are_printed_as_they_are(tmp_path: Path) -> None:
    """Not as markup or emoji codes, and not wrapped."""
    folder = tmp_path / ":dog: [red]x" / ("long" * 50)
    folder.parent.mkdir()
    sources.hf(folder)
    assert value_of(run("inspect", folder), "model") == str(folder)


def test_a_folder_of_a_presets_name_is_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sources.hf(tmp_path / "OpenELM-3B")
    assert as_json("OpenELM-3B")["config"]["model_dim"] == 64


# The plot.


def bars(image: Path) -> Any:
    from matplotlib import image as reader

    pixels = np.asarray(reader.imread(image))
    assert pixels.ndim == 3
    return pixels


def test_the_plot_is_a_png(tmp_path: Path) -> None:
    image = tmp_path / "x.png"
    done = run("inspect", "OpenELM-270M", "--plot", image)
    assert (done.status, done.err) == (0, "")
    assert image.read_bytes().startswith(b"\x89PNG\r\n")
    assert "layer" in done.out, "the table is still printed"
    other = tmp_path / "y.png"
    run("inspect", "OpenELM-3B", "--json", "--plot", other)
    assert bars(image).shape == bars(other).shape
    assert (bars(image) != bars(other)).any()


@pytest.mark.parametrize("name", ["missing/x.png", "."])
def test_a_plot_that_cannot_be_written(tmp_path: Path, name: str) -> None:
    done = run("inspect", "OpenELM-270M", "--plot", tmp_path / name)
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith(f"error: {tmp_path / name}: the plot cannot be written: ")
    assert done.err.count("\n") == 1


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = run("inspect", "OpenELM-270M", "--plot", tmp_path / "x.png")
    assert (done.status, done.out) == (2, "")
    assert done.err == "error: --plot needs matplotlib: pip install 'openelm-mlx[plots]'\n"


# Refusals.


def test_what_is_no_model(tmp_path: Path) -> None:
    cases = {tmp_path: "no config.json", MODEL: "is a file, not a model folder", tmp_path / "x": "No such file"}
    for place, message in cases.items():
        done = run("inspect", place)
        assert (done.status, done.out) == (2, "")
        assert message in done.err
        assert done.err.count("\n") == 1


def test_a_narrow_terminal_loses_no_digit(tmp_path: Path) -> None:
    wide, narrow = (run_apart("inspect", "OpenELM-270M", env=environment(COLUMNS=n)).out for n in ("200", "1"))
    assert wide == narrow
    assert "5,409,408" in narrow
