"""Opening files that people name: whether one is there, and reading it whole, with errors that say what is wrong."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from threading import Event
from typing import Any

from openelm_mlx.errors import OpenELMError

LARGEST_TEXT = 1 << 28
"""Bytes; far above any config or tokenizer. What is larger is another file, or has no end."""


def is_there(path: Path, error: type[OpenELMError]) -> bool:
    """Whether there is a file at `path`.

    Raises:
        error: something else is there (a broken link, a folder, a pipe), or it cannot be known: taking it for
            absent would quietly change what a model does.
    """
    try:
        if path.is_file():
            return True
        there = os.path.lexists(path)
    except OSError as e:
        raise error(f"{path}: cannot be looked at: {e.strerror or e}") from None
    if there:
        raise error(f"{path}: is no regular file" + (" but a link that leads to none" if path.is_symlink() else ""))
    return False


def read(path: Path, error: type[OpenELMError], largest: int = LARGEST_TEXT) -> bytes:
    """The bytes of a file of at most `largest` bytes.

    Raises:
        error: it is not there, no regular file, too large, or cannot be read.
    """
    if not is_there(path, error):
        raise error(f"{path}: no such file")
    try:
        with path.open("rb") as f:
            data = f.read(largest + 1)
    except OSError as e:
        raise error(f"{path}: cannot be read: {e.strerror or e}") from None
    if len(data) > largest:
        raise error(f"{path}: too large for what it is taken for (over {largest:,} bytes)")
    return data


def sha256(path: Path, stop: Event | None = None) -> str:
    """Hex digest of a file's bytes; of those read so far once `stop` is set."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as f:
        while not (stop and stop.is_set()) and (chunk := f.read(1 << 22)):
            digest.update(chunk)
    return digest.hexdigest()


def read_json(path: Path, error: type[OpenELMError]) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        error: as for :func:`read`, or it is something else than a JSON object.
    """
    return parse_json(path, read(path, error), error)


def parse_json(path: Path, data: bytes, error: type[OpenELMError]) -> dict[str, Any]:
    """A JSON object from the bytes of a file.

    Raises:
        error: they are something else.
    """
    try:
        value = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as e:
        raise error(f"{path}: not readable as JSON: {e}") from None
    if not isinstance(value, dict):
        raise error(f"{path}: a JSON object is needed, not a {type(value).__name__}")
    return value


def expand(path: str | Path) -> Path:
    """A path with ``~`` and ``~user`` replaced by the home folder.

    Raises:
        OpenELMError: there is no such user, or no home folder.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as e:
        raise OpenELMError(f"{path}: {e}") from None
