"""loss.png: what is drawn of a run, however short or broken."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openelm_mlx import plotting
from openelm_mlx.errors import OpenELMError
from openelm_mlx.finetune.plots import draw, smoothed

Line = dict[str, Any]


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that were drawn, which else are let go."""
    kept: list[Any] = []
    real = plotting.png

    @contextmanager
    def png(path: Path) -> Iterator[Any]:
        with real(path) as figure:
            kept.append(figure)
            yield figure

    monkeypatch.setattr(plotting, "png", png)
    return kept


def drawn(tmp_path: Path, lines: list[Line], figures: list[Any], cut: str = "") -> dict[str, list[tuple[float, float]]]:
    """The points of each curve by its name in the legend."""
    metrics, png = tmp_path / "metrics.jsonl", tmp_path / "loss.png"
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines) + cut)
    draw(metrics, png)
    assert png.read_bytes().startswith(b"\x89PNG\r\n")
    (axes,) = figures[-1].axes
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == [curve.get_label() for curve in axes.lines]
    return {
        curve.get_label(): [(float(x), float(y)) for x, y in zip(curve.get_xdata(), curve.get_ydata(), strict=True)]
        for curve in axes.lines
    }


def updates(losses: list[float]) -> list[Line]:
    return [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]


def test_a_whole_run(tmp_path: Path, figures: list[Any]) -> None:
    losses = [4 - n / 100 + (n % 2) / 2 for n in range(200)]
    lines = updates(losses) + [
        {"step": n, "valid_loss": v} for n, v in ((50, 3.0), (100, 2.5), (150, 2.5), (200, 2.75))
    ]
    curves = drawn(tmp_path, [*lines, {"step": 200, "test_loss": 2.8}], figures)
    assert list(curves) == [
        "training",
        "training, smoothed",
        "validation",
        "best validation 2.500 at step 100",
        "test 2.800",
    ]
    assert curves["training"] == [(n, loss) for n, loss in enumerate(losses, 1)]
    assert curves["validation"] == [(50, 3.0), (100, 2.5), (150, 2.5), (200, 2.75)]
    assert curves["best validation 2.500 at step 100"] == [(100, 2.5)]
    assert curves["test 2.800"] == [(200, 2.8)]
    raw, smooth = (np.abs(np.diff([y for _, y in curves[name]])).mean() for name in ("training", "training, smoothed"))
    assert smooth < raw / 5


def test_one_update_is_a_point_that_can_be_seen(tmp_path: Path, figures: list[Any]) -> None:
    assert drawn(tmp_path, updates([2.0]), figures) == {"training": [(1, 2.0)]}
    (curve,) = figures[-1].axes[0].lines
    assert curve.get_marker() == "."


def test_only_an_evaluation(tmp_path: Path, figures: list[Any]) -> None:
    curves = drawn(tmp_path, [{"step": 0, "valid_loss": 2.0}], figures)
    assert list(curves) == ["validation", "best validation 2.000 at step 0"]


def test_losses_that_are_not_finite_are_left_out_and_marked(tmp_path: Path, figures: list[Any]) -> None:
    lines = [*updates([2.0, 1.5, math.nan]), {"step": 2, "valid_loss": math.nan}, {"step": 3, "valid_loss": 1.0}]
    curves = drawn(tmp_path, lines, figures)
    assert curves["training"] == [(1, 2.0), (2, 1.5)]
    assert curves["validation"] == [(3, 1.0)]
    assert [x for x, _ in curves["not finite at step 3"]] == [3, 3]


def test_a_resumed_run_is_drawn_as_it_was_last(tmp_path: Path, figures: list[Any]) -> None:
    lines = [*updates([3.0, 9.0, 9.0]), {"step": 2, "loss": 2.0}, {"step": 3, "loss": 1.0}]
    assert drawn(tmp_path, lines, figures, cut='{"step": 4, "lo') == {"training": [(1, 3.0), (2, 2.0), (3, 1.0)]}


def test_nothing_to_plot(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    for text in ("", '{"step": 1, "seconds": 2}\n'):
        metrics.write_text(text)
        with pytest.raises(OpenELMError, match=r"metrics\.jsonl: there is nothing to plot"):
            draw(metrics, tmp_path / "loss.png")
    assert not (tmp_path / "loss.png").exists()


@pytest.mark.parametrize("count", [1, 2, 39, 40, 400])
def test_smoothing_keeps_a_straight_line(count: int) -> None:
    values = [3.0 - n / 100 for n in range(count)]
    means, reach = smoothed(values), count // 40
    inside = slice(reach, count - reach)
    np.testing.assert_allclose(means[inside], values[inside], rtol=1e-12)
    assert len(means) == count
    assert means[0] == pytest.approx(np.mean(values[: reach + 1]))
    assert means[-1] == pytest.approx(np.mean(values[-reach - 1 :]))


def test_the_axis_names_what_a_loss_is_of(tmp_path: Path, figures: list[Any]) -> None:
    for extra, unit in (({}, "token"), ({"accuracy": 0.5, "margin": -0.1}, "pair")):
        drawn(tmp_path, [{"step": 1, "loss": 2.0, **extra}], figures)
        assert figures[-1].axes[0].get_ylabel() == f"loss (nats a {unit})"
