"""Where long work on files tells what it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """By default nothing is told but by the bars of downloads."""

    say: Callable[[str], None] = lambda line: None
    """Called with each line for the person."""
    bytes_read: Callable[[int, int], None] = lambda done, total: None
    """Called with the bytes of the source that are done, and all of them."""
    quiet: bool = False
    """No bars of downloads on stderr either."""


SILENT = Progress()
