"""Reading metrics.jsonl, in which a run tells how it went."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from openelm_mlx import files
from openelm_mlx.errors import OpenELMError

FILE = "metrics.jsonl"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file, in its order; a half line at the end, as a killed run leaves it, is passed over.

    Raises:
        OpenELMError: it cannot be read, or another line is no JSON object; the message names the line.
    """
    lines = files.read(path, OpenELMError).split(b"\n")
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append(_object(line))
        except ValueError:
            if number == len(lines):  # no line end: it was being written
                break
            raise OpenELMError(f"{path}:{number}: is no JSON object: the file was changed or is damaged") from None
    return found


def _object(line: bytes) -> dict[str, Any]:
    value = json.loads(line)
    if not isinstance(value, dict):
        raise ValueError(line)
    return value
