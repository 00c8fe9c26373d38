"""A run as a picture: its losses over the updates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openelm_mlx import plotting
from openelm_mlx.errors import OpenELMError
from openelm_mlx.finetune.metrics import read_metrics

_POINTS_TO_SMOOTH = 40
"""Fewer updates than this are drawn as they are, with points: a line through one point cannot be seen."""

Points = list[tuple[int, float]]


def draw(metrics: Path, png: Path) -> None:
    """Draw the losses of a metrics file into a PNG file.

    The training loss lightly, and smoothed on top of it (few updates as they are); validations as points, the best of
    them marked; the test split's loss at the end. A step that stands in the file twice, as after a resumed run, is
    drawn as it was last. Losses that are not finite are left out, and said in the legend.

    Raises:
        OpenELMError: the file cannot be read or holds no loss, matplotlib is not installed, or `png` cannot be written.
    """
    lines = read_metrics(metrics)
    training, lost = _points(lines, "loss")
    validation, _ = _points(lines, "valid_loss")
    test, _ = _points(lines, "test_loss")
    if not (training or validation or test):
        raise OpenELMError(f"{metrics}: there is nothing to plot: it holds no loss")
    with plotting.png(png) as figure:
        axes = figure.add_subplot()
        if training:
            _training(axes, training)
        if validation:
            _validation(axes, validation)
        if test:
            axes.plot(*zip(*test, strict=True), "D", color="C2", label=f"test {test[-1][1]:.3f}")
        for step in lost:
            axes.axvline(step, color="C3", linewidth=1, linestyle=":", label=f"not finite at step {step}")
        _frame(axes, "pair" if any("accuracy" in line or "valid_accuracy" in line for line in lines) else "token")


def smoothed(values: Sequence[float]) -> list[float]:
    """Means over about a twentieth of the values, as many before each as after it, and fewer at both ends."""
    reach = len(values) // 40
    sums = [0.0, *itertools.accumulate(values)]
    ranges = [(max(0, i - reach), min(len(values), i + reach + 1)) for i in range(len(values))]
    return [(sums[end] - sums[start]) / (end - start) for start, end in ranges]


def _points(lines: Sequence[dict[str, Any]], key: str) -> tuple[Points, list[int]]:
    """Steps and finite values of one figure; and the steps at which it is not finite."""
    by_step = {line["step"]: float(line[key]) for line in lines if key in line and line[key] is not None}
    found = sorted(by_step.items())
    return [p for p in found if math.isfinite(p[1])], [step for step, value in found if not math.isfinite(value)]


def _training(axes: Any, points: Points) -> None:
    steps, losses = zip(*points, strict=True)
    if len(points) < _POINTS_TO_SMOOTH:
        axes.plot(steps, losses, ".-", color="C0", label="training")
        return
    axes.plot(steps, losses, color="C0", alpha=0.3, linewidth=1, label="training")
    axes.plot(steps, smoothed(losses), color="C0", label="training, smoothed")


def _validation(axes: Any, points: Points) -> None:
    step, loss = min(points, key=lambda p: (p[1], p[0]))
    axes.plot(*zip(*points, strict=True), "o-", color="C1", markersize=4, label="validation")
    axes.plot(step, loss, "*", color="C1", markersize=14, label=f"best validation {loss:.3f} at step {step}")


def _frame(axes: Any, unit: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set(xlabel="update", ylabel=f"loss (nats a {unit})")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
