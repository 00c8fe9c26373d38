"""The pictures: files that are some, and refusals."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openelm_mlx import plotting
from openelm_mlx.benchmarks.plots import plot
from openelm_mlx.benchmarks.protocol import Spread
from openelm_mlx.benchmarks.results import Result
from openelm_mlx.errors import OpenELMError
from tests.benchmarks.made import result, row


def many() -> Result:
    """Two models in two precisions through three programs, one of which does not tell its bytes."""
    known = {"weight_bytes": 500_000_000, "kv_bytes_per_token": 30_000}
    return result(
        *(
            row(
                speed, peer=peer, variant="a, $b_", model=model, precision=precision,
                generation_tps=Spread.of([speed, speed * 0.9]), **(known if peer != "llama.cpp" else {}),
            )
            for model in ("OpenELM-270M", "OpenELM-3B")
            for precision in ("bf16", "4bit")
            for peer, speed in (("openelm-mlx", 100.0), ("mlx-lm", 0.1), ("llama.cpp", 1000.0))
        )
    )  # fmt: skip


def pixels(path: Path) -> Any:
    from matplotlib import image

    return np.asarray(image.imread(path))


def test_the_plot_is_a_png_of_a_sensible_size(tmp_path: Path) -> None:
    plot(many(), tmp_path / "a.png")
    plot(many(), tmp_path / "b.png")
    data = (tmp_path / "a.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n")
    assert data == (tmp_path / "b.png").read_bytes(), "the same picture each time"
    height, width, _ = pixels(tmp_path / "a.png").shape
    assert 800 < width < 3000
    assert 300 < height < 2000
    plot(result(row()), tmp_path / "b.png")
    assert data != (tmp_path / "b.png").read_bytes()


def test_what_is_not_known_is_left_out(tmp_path: Path) -> None:
    known = {"weight_bytes": 1, "kv_bytes_per_token": 1}
    for made in (
        result(row(), bandwidth=None),
        result(row(**known), bandwidth=None),
        result(row(**known), row(gen_tokens=7), name="$x_{"),
    ):
        plot(made, tmp_path / "x.png")
        assert pixels(tmp_path / "x.png").size


def test_no_window_and_nothing_left_open(tmp_path: Path) -> None:
    before = "matplotlib.pyplot" in sys.modules
    plot(many(), tmp_path / "x.png")
    assert ("matplotlib.pyplot" in sys.modules) == before


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OpenELMError, match="nothing to plot"):
        plot(result(), tmp_path / "x.png")
    for place in (tmp_path / "none" / "x.png", tmp_path):
        with pytest.raises(OpenELMError, match="the plot cannot be written: ") as error:
            plot(many(), place)
        assert str(error.value).startswith(f"{place}: ")
    plotting.require()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for draw in (plotting.require, lambda: plot(many(), tmp_path / "x.png")):
        with pytest.raises(OpenELMError, match=r"--plot needs matplotlib: pip install 'openelm-mlx\[plots\]'$"):
            draw()
    assert list(tmp_path.iterdir()) == []
