"""Tables of results for people: plain text, padded by hand, so that a narrow terminal loses no digit."""

from __future__ import annotations

from collections.abc import Sequence

from openelm_mlx.benchmarks.protocol import Spread
from openelm_mlx.benchmarks.results import Ratio, Row

_ROW_HEADINGS = (
    "model", "precision", "program", "tokens", "prompt tok/s", "generation tok/s", "total tok/s",
    "MB/token", "KV kB/position", "ceiling tok/s", "share", "dispatches", "memory GB",
)  # fmt: skip
_RATIO_HEADINGS = ("model", "precision", "tokens", "program", "against", "prompt", "generation", "total")


def table(rows: Sequence[Row]) -> list[str]:
    """One line a row under a line of headings; columns that are empty in all rows are left out.

    ``212.4 ± 1.3`` is the median and half the distance between the slowest and the fastest run; ``tokens`` those of
    the prompt and the generated ones; ``MB/token`` weights read for a token; ``share`` the part of the ceiling reached.
    """
    return aligned([_ROW_HEADINGS, *(_cells(row) for row in rows)], left=(0, 1, 2))


def ratio_table(ratios: Sequence[Ratio]) -> list[str]:
    """One line a ratio under a line of headings: how many times as fast `program` is as the one it is held against."""
    cells = [
        (
            r.model,
            r.precision,
            f"{r.prompt_tokens}+{r.gen_tokens}",
            r.program,
            r.to,
            *(f"{number(s.median)}x ({number(s.least)}-{number(s.most)})" for s in (r.prompt, r.generation, r.total)),
        )
        for r in ratios
    ]
    return aligned([_RATIO_HEADINGS, *cells], left=(0, 1, 2, 3, 4))


def aligned(rows: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    """Lines of columns two spaces apart, those in `left` aligned left and the others right.

    Columns without a value below their heading are left out.
    """
    kept = [i for i in range(len(rows[0])) if any(row[i] for row in rows[1:])]
    # Names come from files and folders, and must not steer a terminal.
    shown = [{i: "".join(c if c.isprintable() else "?" for c in row[i]) for i in kept} for row in rows]
    width = {i: max(len(row[i]) for row in shown) for i in kept}
    padded = ([row[i].ljust(width[i]) if i in left else row[i].rjust(width[i]) for i in kept] for row in shown)
    return ["  ".join(cells).rstrip() for cells in padded]


def number(value: float) -> str:
    """Three digits or more: ``0.63``, ``29.0``, ``1,103.2``."""
    return f"{value:,.{_decimals(value)}f}"


def _decimals(value: float) -> int:
    return 1 if value >= 9.995 else 2  # what is rounded to 10 counts as 10


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.model,
        row.precision,
        row.program,
        f"{row.prompt_tokens}+{row.gen_tokens}",
        *(_speed(s) for s in (row.prompt_tps, row.generation_tps, row.total_tps)),
        "" if row.weight_bytes is None else f"{row.weight_bytes / 1e6:,.1f}",
        "" if row.kv_bytes_per_token is None else f"{row.kv_bytes_per_token / 1e3:,.1f}",
        "" if row.ceiling_tps is None else number(row.ceiling_tps),
        "" if row.share is None else f"{row.share:.0%}",
        "" if row.dispatches is None else f"{row.dispatches:,}",
        "" if row.peak_memory_gb is None else f"{row.peak_memory_gb:.2f}",
    )


def _speed(spread: Spread) -> str:
    if len(spread.values) == 1:
        return number(spread.median)
    return f"{number(spread.median)} ± {(spread.most - spread.least) / 2:,.{_decimals(spread.median)}f}"
