"""What has to be true of an output folder before hours of work are put into it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from openelm_mlx.atomic import OutputError
from openelm_mlx.checkpoint import PROVENANCE
from openelm_mlx.errors import ConfigError
from openelm_mlx.files import read_json
from openelm_mlx.writer import TensorSpec


def is_our_model(folder: Path) -> bool:
    """Whether this program wrote a model folder, so that it may replace it."""
    try:
        return PROVENANCE in read_json(folder / "config.json", ConfigError)
    except ConfigError:
        return False


def require_apart(source: Path, out: Path) -> None:
    """Refuse an output folder that is, or holds, a source: replacing it would delete what is being read.

    Raises:
        OutputError: it does.
    """
    place = Path(os.path.realpath(source))
    if Path(os.path.realpath(out)) in (place, *place.parents) and out.exists():
        raise OutputError(f"{out}: holds the source itself, which replacing it would delete; name another folder")


def require_room(out: Path, written: Iterable[TensorSpec]) -> None:
    """Say that the disk is too small before an hour of work, not after it.

    Raises:
        OutputError: it is.
    """
    needed = sum(s.nbytes for s in written)
    place = next(p for p in (out, *out.absolute().parents) if p.exists())
    if (free := shutil.disk_usage(place).free) < needed:
        raise OutputError(f"{out}: needs {needed / 1e6:,.1f} MB, and the disk has {free / 1e6:,.1f} MB free")
