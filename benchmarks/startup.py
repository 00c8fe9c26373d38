"""Cold start: from starting a process to the first text that reaches its reader, several programs in turn.

The programs are run as a person runs them, from their console scripts and in the person's environment, but for what
would favour one of them: libraries loaded ahead of a program (LD_PRELOAD) and modules put in its way (PYTHONPATH).
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from openelm_mlx.benchmarks.peers.base import last_line
from openelm_mlx.benchmarks.protocol import Spread
from openelm_mlx.benchmarks.table import aligned, number
from openelm_mlx.errors import OpenELMError

PROMPT = "Once upon a time there was"
REPEATS = 10
TIME_LIMIT = 600.0
"""Seconds after which a start has failed."""

_GRACE = 10.0
"""Seconds for a program whose output has ended to end by itself, so that its last words and its status are its own."""

_MEDDLING = ("LD_PRELOAD", "DYLD_INSERT_LIBRARIES", "PYTHONPATH", "PYTHONSTARTUP", "PYTHONUNBUFFERED")


@dataclass(frozen=True)
class Program:
    """Something that is started and writes text to its standard output."""

    name: str
    command: tuple[str, ...]
    before_text: bytes = b""
    """What it writes before the text."""


@dataclass(frozen=True)
class StartUp:
    """How long a program took."""

    program: str
    seconds: Spread | None
    """From before the process was started until its first text was read; None if it failed."""
    failed: str | None = None
    """Why there is no figure."""


def generators(model_folder: Path, prompt: str = PROMPT, max_tokens: int = 1) -> list[Program]:
    """``openelm generate`` and ``mlx_lm.generate`` with the same model folder, prompt and number of tokens.

    With one token both write it as soon as they have it. With more, mlx-lm holds text back until the next word begins.
    """
    arguments = ("--model", str(model_folder), "--prompt", prompt, "--max-tokens", str(max_tokens))
    return [
        Program("openelm generate", (*_script("openelm", "openelm_mlx"), "generate", *arguments)),
        Program("mlx_lm.generate", (*_script("mlx_lm.generate", "mlx_lm", "generate"), *arguments), b"==========\n"),
    ]


def phases() -> list[Program]:
    """Parts of a start that need no model: Python alone, our command alone, and what either program imports."""
    said = "; print(1)"
    return [
        Program("Python alone", (sys.executable, "-c", "print(1)")),
        Program("openelm --version", (*_script("openelm", "openelm_mlx"), "--version")),
        Program(
            "what openelm generate imports",
            (sys.executable, "-c", f"import openelm_mlx.generation, openelm_mlx.loading, openelm_mlx.tokenizer{said}"),
        ),
        Program("what mlx_lm.generate imports", (sys.executable, "-c", f"import mlx_lm.generate{said}")),
    ]


def _script(script: str, *module: str) -> tuple[str, ...]:
    """The console script beside this Python, or the module it stands for where it was not installed."""
    path = Path(sys.executable).with_name(script)
    return (str(path),) if path.exists() else (sys.executable, "-m", *module)


def cold_start(programs: Sequence[Program], repeats: int = REPEATS, *, time_limit: float = TIME_LIMIT) -> list[StartUp]:
    """Start every program `repeats` times, in turn, after one start each that fills the page cache and does not count.

    Raises:
        OpenELMError: there is nothing to repeat.
    """
    if repeats < 1:
        raise OpenELMError(f"repeats must be 1 or more, not {repeats}")
    taken: dict[str, list[float]] = {program.name: [] for program in programs}
    failed: dict[str, str] = {}
    for _ in range(repeats + 1):
        for program in programs:
            if program.name in failed:
                continue
            try:
                taken[program.name].append(first_text(program, time_limit))
            except OpenELMError as e:
                failed[program.name] = str(e)
    return [
        StartUp(name, None, failed[name]) if name in failed else StartUp(name, Spread.of(values[1:]))
        for name, values in taken.items()
    ]


def first_text(program: Program, time_limit: float = TIME_LIMIT) -> float:
    """Seconds from starting a program to reading the first byte of its text. The program is ended then.

    Raises:
        OpenELMError: it cannot be started, or writes no text; the message is the last line of its own, if it has one.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _MEDDLING}
    with tempfile.TemporaryFile() as errors:
        start = time.perf_counter()
        try:
            child = subprocess.Popen(
                program.command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, env=environment
            )
        except OSError as e:
            raise OpenELMError(f"{program.command[0]}: {e.strerror or e}") from None
        assert child.stdout
        with child.stdout as pipe:
            try:
                seen = _read_until_text(pipe.fileno(), program.before_text, start + time_limit)
                if seen == 0:
                    with suppress(subprocess.TimeoutExpired):  # its output has ended: so will it
                        child.wait(_GRACE)
            finally:
                child.kill()  # which does nothing to one that has ended
                status = child.wait()
        if seen is None:
            raise OpenELMError(f"no text after {time_limit:g} s")
        if seen == 0:
            raise OpenELMError(_last_words(errors, status))
        return seen - start


def _read_until_text(pipe: int, before: bytes, deadline: float) -> float | None:
    """The clock when the first byte after `before` was read; 0 if the pipe ended without it, None at the deadline."""
    output = b""
    while True:
        ready, _, _ = select.select([pipe], [], [], max(deadline - time.perf_counter(), 0))
        if not ready:
            return None
        chunk = os.read(pipe, 1 << 16)
        now = time.perf_counter()
        if not chunk:
            return 0.0
        output += chunk
        if len(output) > len(before) and (not before or output.partition(before)[2]):
            return now


def _last_words(errors: IO[bytes], status: int) -> str:
    errors.seek(0)
    return last_line(errors.read().decode(errors="replace")) or f"it ended with status {status} and wrote no text"


def lines(starts: Sequence[StartUp]) -> list[str]:
    """The results for people, each beside the first."""
    rows = [(s.program, *_figures(s.seconds, starts[0])) for s in starts if s.seconds]
    failed = [f"{s.program}: no figure: {s.failed}" for s in starts if not s.seconds]
    return [*(aligned([("program", "first text after", "against"), *rows], left=(0, 2)) if rows else []), *failed]


def _figures(seconds: Spread, first: StartUp) -> tuple[str, str]:
    shown = f"{seconds.median:.2f} s ({seconds.least:.2f}-{seconds.most:.2f})"
    if first.seconds is None or seconds is first.seconds:
        return shown, ""
    return shown, f"{number((seconds / first.seconds).median)}x {first.program}"
