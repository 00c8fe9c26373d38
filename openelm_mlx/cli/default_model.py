"""The model that a command takes when none is named."""

from __future__ import annotations

import sys

HELP = "the embedded demonstration model"
"""How a command's help names it."""

_NOTICE = (
    "no model named: taking the embedded demonstration model, which writes like a 19th-century president "
    "and knows nothing"
)


def named_or_embedded(model: str | None) -> str:
    """The model that was named; else the embedded one, which is said in one line on standard error.

    Raises:
        OpenELMError: none was named, and the embedded one's files are missing.
    """
    if model is not None:
        return model
    from openelm_mlx.assets import demo_model

    folder = demo_model()
    print(_NOTICE, file=sys.stderr, flush=True)
    return str(folder)
