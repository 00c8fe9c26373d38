"""`openelm fuse`: every option reaches the job, and what is said where."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from openelm_mlx.convert.job import convert
from openelm_mlx.finetune.effect import Effect
from openelm_mlx.finetune.fuse_command import _effect
from openelm_mlx.loading import load_model
from tests.adapters.made import saved, trained_adapter
from tests.support import sources
from tests.support.cli import Done, run, run_apart

EFFECT = (
    r"compared with the adapter on its base, on 64 tokens, in float32:\n"
    r"  logit difference      max \S+, mean (\S+)\n"
    r"  the adapter's effect  mean (\S+); the difference is (\S+)% of that\n"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model in 4 bits; read only."""
    root = tmp_path_factory.mktemp("model")
    return convert(sources.hf(root / "hf"), root / "model", precision="4bit", group_size=32).folder


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("run") / "run1", trained_adapter(load_model(model), precision="4bit"))


def fuse(model: Path, adapter: Path, out: Path, *options: str) -> Done:
    return run("fuse", "--model", model, "--adapter", adapter, "--out", out, *options)


def config_of(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return values


def size(folder: Path) -> str:
    return f"{sum(t.nbytes for t in sources.written(folder).values()) / 1e6:,.1f} MB"


def test_the_result_on_stdout_and_the_rest_on_stderr(model: Path, adapter: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run_apart("fuse", "--model", model, "--adapter", adapter, "--out", out)
    assert done.status == 0, done.err
    summary, _, effect = done.out.partition("\n")
    assert summary == f"{out}: 2 layers, bf16, {size(out)}; with lora of rank 4 in 8 matrices"
    match = re.fullmatch(EFFECT, effect)
    assert match
    difference, whole, share = map(float, match.groups())
    assert share == pytest.approx(100 * difference / whole, rel=0.1)
    assert done.err == (
        "the base is packed (4bit): the result is bf16; --requantize packs it\n"
        "comparing the result with the adapter on its base\n"
    )


def test_requantize(model: Path, adapter: Path, tmp_path: Path) -> None:
    done = fuse(model, adapter, tmp_path / "out", "--requantize")
    assert done.out.startswith(f"{tmp_path / 'out'}: 2 layers, 4bit, {size(tmp_path / 'out')}; with lora ")
    match = re.search(EFFECT, done.out)
    assert match
    assert float(match[3].replace(",", "")) > 5, "4 bits take a part away that one can see"
    assert config_of(tmp_path / "out")["quantization"]["bits"] == 4


def test_precision(model: Path, adapter: Path, tmp_path: Path) -> None:
    done = fuse(model, adapter, tmp_path / "a", "--precision", "fp32")
    assert ": 2 layers, fp32, " in done.out
    assert config_of(tmp_path / "a")["torch_dtype"] == "float32"
    done = fuse(model, adapter, tmp_path / "b", "--precision", "fp16")
    assert done.err.startswith("warning: float16: OpenELM was trained in bfloat16")
    assert config_of(tmp_path / "b")["torch_dtype"] == "float16"


def test_quiet_leaves_the_comparison(model: Path, adapter: Path, tmp_path: Path) -> None:
    for n, quiet in enumerate(("--quiet", "-q")):
        done = fuse(model, adapter, tmp_path / str(n), quiet)
        assert (done.status, done.err) == (0, "")
        assert re.fullmatch(EFFECT, done.out)


@pytest.mark.parametrize(
    ("difference", "effect", "expected"),
    [
        (0.0000123, 1.0, "; the difference is 0.0012% of that"),
        (0.0345, 1.0, "; the difference is 3.5% of that"),
        (0.345, 1.0, "; the difference is 34% of that"),
        (12.3, 1.0, "; the difference is 1,230% of that"),
        (0.0, 0.0, ""),
    ],
)
def test_the_share_is_readable_at_every_size(difference: float, effect: float, expected: str) -> None:
    lines = _effect(Effect(tokens=3, max_difference=1.5, mean_difference=difference, mean_effect=effect)).splitlines()
    assert lines[-1] == f"  the adapter's effect  mean {effect:.3g}{expected}"


def test_force(model: Path, adapter: Path, tmp_path: Path) -> None:
    assert fuse(model, adapter, tmp_path / "out").status == 0
    done = fuse(model, adapter, tmp_path / "out", "--precision", "fp32")
    assert (done.status, done.out) == (2, "")
    assert "exists already; name another folder, or replace it with --force" in done.err
    assert fuse(model, adapter, tmp_path / "out", "--precision", "fp32", "--force").status == 0
    assert config_of(tmp_path / "out")["torch_dtype"] == "float32"


def test_refusals_are_one_line(model: Path, adapter: Path, tmp_path: Path) -> None:
    for arguments in (
        (model, model),
        (model, tmp_path / "x"),
        (tmp_path / "x", adapter),
        (model, adapter, "--precision", "4bit"),
        (model, adapter, "--precision", "bf16", "--requantize"),
        (model, adapter, "--revision", "v1"),
    ):
        first, second, *options = arguments
        done = fuse(Path(first), Path(second), tmp_path / "out", *map(str, options))
        assert (done.status, done.out) == (2, "")
        assert done.err.startswith("error: ")
        assert done.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
