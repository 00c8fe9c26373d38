"""A result as a picture: throughput by size and precision, and the roofline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openelm_mlx import plotting
from openelm_mlx.benchmarks.bandwidth import Bandwidth
from openelm_mlx.benchmarks.results import Result, Row
from openelm_mlx.benchmarks.roofline import mean_context
from openelm_mlx.benchmarks.table import number
from openelm_mlx.errors import OpenELMError

_MARKERS = "osD^vP*X"


def plot(result: Result, path: Path) -> None:
    """Draw a result's rows into a PNG file.

    Left, generation speed: a group of bars for every model, precision and length, one bar a program, with the slowest
    and fastest run. Right, where the bytes read a token are known: speed against them, and the line that the machine's
    bandwidth allows.

    Raises:
        OpenELMError: the result has no rows, matplotlib is not installed, or the file cannot be written.
    """
    if not result.rows:
        raise OpenELMError(f"{path}: there is nothing to plot: the result has no rows")
    programs = list(dict.fromkeys(row.program for row in result.rows))
    with plotting.png(path, size=(13, 5)) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        _bars(left, result.rows, programs)
        _roofline(right, result.rows, programs, result.bandwidth)
        figure.suptitle(f"{result.name} on {result.machine.get('gpu') or result.machine.get('chip')}")


def _bars(axes: Any, rows: Sequence[Row], programs: Sequence[str]) -> None:
    tasks = list(dict.fromkeys(row.task for row in rows))
    width = 0.8 / len(programs)
    for i, program in enumerate(programs):
        own = [row for row in rows if row.program == program]
        places = [tasks.index(row.task) + (i - (len(programs) - 1) / 2) * width for row in own]
        speeds = [row.generation_tps for row in own]
        spreads = [[s.median - s.least for s in speeds], [s.most - s.median for s in speeds]]
        bars = axes.bar(places, [s.median for s in speeds], width, yerr=spreads, capsize=2, label=program)
        axes.bar_label(bars, [number(s.median) for s in speeds], fontsize=7, padding=2)
    lengths = {task[2:] for task in tasks}
    labels = [f"{m}\n{p}" + (f"\n{prompt}+{gen}" if len(lengths) > 1 else "") for m, p, prompt, gen in tasks]
    axes.set_xticks(range(len(tasks)), labels, fontsize=8)
    axes.set(ylabel="generated tokens/s", title="throughput")
    axes.margins(y=0.15)  # room for the numbers
    axes.legend(fontsize=8)


def _roofline(axes: Any, rows: Sequence[Row], programs: Sequence[str], bandwidth: Bandwidth | None) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    known = [(row, read / 1e6) for row in rows if (read := _bytes_read(row)) is not None]
    for i, program in enumerate(programs):
        own = [(row, read) for row, read in known if row.program == program]
        if own:
            reads, speeds = [read for _, read in own], [row.generation_tps.median for row, _ in own]
            axes.plot(reads, speeds, _MARKERS[i % len(_MARKERS)], color=f"C{i}", label=program)
    for task in dict.fromkeys(row.task for row, _ in known):
        slowest, read = min((k for k in known if k[0].task == task), key=lambda k: k[0].generation_tps.median)
        below = (read, slowest.generation_tps.median)
        axes.annotate(f"{task[0]} {task[1]}", below, (0, -10), textcoords="offset points", fontsize=6, ha="center")
    if bandwidth and known:
        ends = [min(read for _, read in known) / 1.6, max(read for _, read in known) * 1.6]
        line = [bandwidth.bytes_per_s / 1e6 / read for read in ends]
        axes.plot(ends, line, "k--", linewidth=1, label=f"{bandwidth.bytes_per_s / 1e9:.3g} GB/s")
    axes.set(xscale="log", yscale="log", xlabel="MB read a token", ylabel="generated tokens/s", title="roofline")
    for axis, ticks in ((axes.xaxis, (1, 2, 5)), (axes.yaxis, (1, 2, 3, 5, 7))):
        axis.set_major_locator(LogLocator(subs=ticks))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(NullLocator())
    if known:
        axes.legend(fontsize=8)
    else:
        axes.text(0.5, 0.5, "the bytes read a token are not known", ha="center", transform=axes.transAxes)


def _bytes_read(row: Row) -> float | None:
    if row.weight_bytes is None or row.kv_bytes_per_token is None:
        return None
    return row.weight_bytes + row.kv_bytes_per_token * mean_context(row.prompt_tokens, row.gen_tokens)
