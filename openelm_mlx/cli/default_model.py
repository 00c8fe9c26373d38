"""The model that a command runs where none was named."""

from __future__ import annotations

import sys


def model_or_demo(model: str | None, *, quiet: bool = False) -> str:
    """`model`, or the folder of the embedded one, which a line on standard error says unless `quiet`.

    Raises:
        OpenELMError: there is neither.
    """
    if model is not None:
        return model
    from openelm_mlx import assets

    folder = assets.demo_model()
    if not quiet:
        print(f"no model named: using the embedded one, {assets.ABOUT}", file=sys.stderr)
    return str(folder)
