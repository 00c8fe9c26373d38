"""Running a module of this very package in a Python process of its own, whichever Python that is."""

from __future__ import annotations

from pathlib import Path

_CODE = (
    "import sys; root = sys.argv.pop(1); sys.path[:] = [root, *filter(None, sys.path)]; import openelm_mlx; "
    "sys.path.remove(root); from {} import main; main()"
)
"""Nothing else beside the package is found, nor what lies in the current folder."""


def arguments(module: str) -> list[str]:
    """What a Python interpreter is to be given to run ``main()`` of a module; what follows is in ``sys.argv[1:]``."""
    return ["-c", _CODE.format(module), str(Path(__file__).parents[1])]
