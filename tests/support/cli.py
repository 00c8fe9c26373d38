"""Running the command line: in this process, which is fast, or as a process of its own, which is the real thing."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from openelm_mlx.cli import app
from openelm_mlx.cli.errors import exit_status

ROOT = Path(__file__).parents[2]
MAIN = "from openelm_mlx.cli import main; main()"


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    status: int
    out: str
    err: str


def run(*arguments: str | Path, stdin: bytes = b"") -> Done:
    """Run ``openelm ARGUMENTS`` in this process."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    before = sys.stdin
    with _restored(), redirect_stdout(out), redirect_stderr(err):
        sys.stdin = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
        try:
            status = exit_status(lambda: app([str(a) for a in arguments], prog_name="openelm"))
        finally:
            sys.stdin = before
    return Done(status, _text(out), _text(err))


def _text(stream: io.TextIOWrapper) -> str:
    assert isinstance(stream.buffer, io.BytesIO)
    return stream.buffer.getvalue().decode("utf-8")


@contextmanager
def _restored() -> Iterator[None]:
    """Put back what the command line sets for the whole process."""
    handler, show = signal.getsignal(signal.SIGTERM), warnings.showwarning
    filters = warnings.filters[:]
    warnings.resetwarnings()
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
        warnings.showwarning = show
        warnings.filters[:] = filters  # type: ignore[index]


def environment(**more: str) -> dict[str, str]:
    """The environment of a child process: Python finds this checkout, buffers, and the terminal's width is fixed."""
    ours = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return {**ours, "PYTHONPATH": str(ROOT), "COLUMNS": "120", **more}


def start(*arguments: str | Path, before: str = "", **options: object) -> subprocess.Popen[bytes]:
    """Start ``openelm ARGUMENTS`` in a process of its own, after the Python lines `before`."""
    command = [sys.executable, "-c", f"{before}\n{MAIN}", *map(str, arguments)]
    pipes: dict[str, object] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, **{"env": environment(), **pipes, **options})  # type: ignore[call-overload]


def finish(process: subprocess.Popen[bytes], stdin: bytes = b"", timeout: float = 60) -> Done:
    """Wait for a started process."""
    out, err = process.communicate(stdin, timeout=timeout)
    return Done(process.returncode, (out or b"").decode(), (err or b"").decode())


def run_apart(
    *arguments: str | Path, stdin: bytes = b"", env: Mapping[str, str] | None = None, before: str = ""
) -> Done:
    """Run ``openelm ARGUMENTS`` in a process of its own."""
    return finish(start(*arguments, before=before, env=dict(env) if env else environment()), stdin)


def modules_of(record: Path, *arguments: str | Path) -> tuple[Done, set[str]]:
    """Run ``openelm ARGUMENTS`` in a process of its own; also what it had imported when it ended."""
    note = f"import atexit, sys; atexit.register(lambda: open({str(record)!r}, 'w').write(chr(10).join(sys.modules)))"
    done = run_apart(*arguments, before=note)
    return done, set(record.read_text().split())
