"""Running another verb as a process of its own, whose output arrives while it runs."""

from __future__ import annotations

import codecs
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from openelm_mlx import own_python

_TERMINAL = ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
"""Variables that make a program draw as on a terminal, though it writes into a pipe."""


@dataclass(frozen=True)
class Ending:
    """How a verb ended."""

    status: int
    stopped: bool
    """Whether it was asked to stop because its time was over."""


def run_verb(
    arguments: Sequence[str], folder: Path, show: Callable[[str], None], *, limit: float | None = None
) -> Ending:
    """Run ``openelm ARGUMENTS`` in a folder and wait for its end. Whatever ends the wait ends the process too.

    Args:
        arguments: the verb and what follows it.
        folder: the current folder of the process.
        show: given its output, standard error included, in pieces.
        limit: seconds after which it gets a SIGTERM, once.
    """
    process = subprocess.Popen(
        [sys.executable, *own_python.arguments("openelm_mlx.cli"), *arguments],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=_environment(),
        start_new_session=True,  # Ctrl-C is not for it, and what it starts can be ended with it
    )
    try:
        stopped = _follow(process, show, limit)
        return Ending(process.wait(), stopped)
    finally:
        _end(process)


def _environment() -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if name not in _TERMINAL}
    return {**ours, "TERM": "dumb", "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"}


def _follow(process: subprocess.Popen[bytes], show: Callable[[str], None], limit: float | None) -> bool:
    """Pass the output on until it ends; whether the process was asked to stop."""
    assert process.stdout
    out, decoder = process.stdout.fileno(), codecs.getincrementaldecoder("utf-8")("replace")
    deadline, stopped = None if limit is None else time.monotonic() + limit, False
    while True:
        left = None if deadline is None or stopped else max(deadline - time.monotonic(), 0)
        if not select.select([out], [], [], left)[0]:
            process.send_signal(signal.SIGTERM)
            stopped = True
            continue
        piece = os.read(out, 1 << 16)
        if not piece:
            return stopped
        show(decoder.decode(piece))


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with suppress(ProcessLookupError, PermissionError):  # it and its group are gone (macOS says the latter)
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.stdout
    process.stdout.close()
