"""A line on a terminal's standard error that what follows replaces."""

from __future__ import annotations

import sys
from collections.abc import Callable

Show = Callable[[str], None]


def status_line(*, quiet: bool) -> Show | None:
    """Shows a line in place of the last one, and nothing for an empty one; None where nobody would see it."""
    if quiet or not sys.stderr.isatty():
        return None
    return lambda line: print(f"\r{line}\x1b[K", end="", file=sys.stderr, flush=True)
