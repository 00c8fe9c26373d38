"""Drawing into PNG files, with matplotlib where it is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from openelm_mlx.errors import OpenELMError


def possible() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def require() -> None:
    """Refuse a plot that could not be drawn, before the work for it is done.

    Raises:
        OpenELMError: matplotlib is not installed.
    """
    if not possible():
        raise OpenELMError("--plot needs matplotlib: pip install 'openelm-mlx[plots]'")


@contextmanager
def png(path: Path, *, size: tuple[float, float] = (8, 4)) -> Iterator[Any]:
    """An empty figure of `size` inches; what the block draws is written to `path` when it ends.

    No windows, no pyplot: the figure is drawn by Agg and let go.

    Raises:
        OpenELMError: matplotlib is not installed, or the file cannot be written.
    """
    require()
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # the same picture for everybody
        matplotlib.rcParams["text.parse_math"] = False  # a $ in a name is a $
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        try:
            figure.savefig(path, format="png")
        except OSError as e:
            raise OpenELMError(f"{path}: the plot cannot be written: {e.strerror or e}") from None
