"""A bar for work that goes through a file's bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from openelm_mlx.progress import Progress


@contextmanager
def byte_bar(doing: str, *, quiet: bool) -> Iterator[Progress]:
    """Lines and, on a terminal, a bar on standard error, for what the block does; gone when it ends."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True, quiet=quiet, soft_wrap=True, highlight=False, emoji=False)
    columns = (TextColumn(doing), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    bar = Bar(*columns, console=console, transient=True)
    task = bar.add_task(doing, total=None)

    def show(done: int, total: int) -> None:
        if console.is_interactive:
            bar.start()  # not before: it would hide the bars of a download
        bar.update(task, completed=done, total=total)

    try:
        yield Progress(lambda line: console.print(line, markup=False), show, quiet)
    finally:
        if bar.live.is_started:
            bar.stop()
