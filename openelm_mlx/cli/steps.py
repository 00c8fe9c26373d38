"""Running other commands, one after another, and showing each as it would be typed."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import Console


class Steps:
    """Runs ``openelm`` commands in a folder, in processes of their own.

    Args:
        console: where commands are shown.
        folder: the commands' current folder.
    """

    def __init__(self, console: Console, folder: Path) -> None:
        self.console, self.folder = console, folder

    def show(self, *arguments: str) -> None:
        """A command, as it is typed."""
        from rich.text import Text

        line = Text("$ ", "dim") + Text(f"openelm {shlex.join(arguments)}", "bold")
        self.console.print(line, soft_wrap=True)

    def run(self, *arguments: str) -> None:
        """Run a command that prints for itself. Raises :class:`typer.Exit` as :meth:`output` does."""
        self._finished(arguments, capture=False)

    def output(self, *arguments: str) -> str:
        """What a command prints to standard output.

        Raises:
            typer.Exit: it failed, with its exit status; its error is on standard error.
        """
        return self._finished(arguments, capture=True)

    def _finished(self, arguments: tuple[str, ...], *, capture: bool) -> str:
        process = subprocess.Popen(
            [sys.executable, "-m", "openelm_mlx", *arguments],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": _with_this_package(os.environ.get("PYTHONPATH"))},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if capture else None,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # Ctrl-C is for this process, which then ends that one with all that it started
        )
        try:
            out, _ = process.communicate()
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        if process.returncode < 0:
            print(f"error: openelm {arguments[0]} was ended by signal {-process.returncode}", file=sys.stderr)
            raise typer.Exit(128 - process.returncode)
        if process.returncode:
            raise typer.Exit(process.returncode)
        return out or ""


def _with_this_package(path: str | None) -> str:
    """A search path that finds this very package from any current folder."""
    root = str(Path(__file__).parents[2])
    return os.pathsep.join([root, *([path] if path else [])])
