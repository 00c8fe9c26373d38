"""``openelm demo``."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from openelm_mlx.cli.status_line import status_line

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def demo(
    keep: Annotated[
        Path | None, typer.Option(help="Folder to make and keep, instead of a temporary one.", show_default=False)
    ] = None,
) -> None:
    """See in two minutes what this program does: convert, generate, fine-tune and measure.

    Runs these commands with a tiny model that comes with the program. It needs no network and leaves nothing behind,
    unless --keep says where.
    """
    from openelm_mlx import files
    from openelm_mlx.cli.stage import Stage
    from openelm_mlx.cli.tour import Tour

    stage = Stage()
    try:
        with _folder(files.expand(keep) if keep else None) as folder:
            Tour(stage, folder, kept=keep is not None).go()
    except KeyboardInterrupt:
        if clear := status_line(quiet=False):
            clear("")  # of the ^C that the terminal wrote
        print("interrupted; nothing was left behind", file=sys.stderr)
        raise


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    """An empty folder: a temporary one, or `keep`, which goes again when the block fails."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="openelm-demo-") as temporary:
            yield Path(temporary)
        return
    from openelm_mlx.atomic import check_output, parents_of

    check_output(keep, force=None, ours=lambda folder: False)
    with parents_of(keep):
        keep.mkdir()
        try:
            yield keep
        except BaseException:
            shutil.rmtree(keep, ignore_errors=True)
            raise
