"""A verb in a process of its own: its output as it comes, its end, and that it never outlives who asked for it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from openelm_mlx import own_python
from openelm_mlx.cli.child import Ending, run_verb
from openelm_mlx.version import __version__
from tests.benchmarks.test_worker import eventually, gone


def instead(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Run these Python lines where the command line would be."""
    monkeypatch.setattr(own_python, "arguments", lambda module: ["-c", code])


def test_the_command_line_runs_in_the_folder(tmp_path: Path) -> None:
    said: list[str] = []
    assert run_verb(["--version"], tmp_path, said.append) == Ending(0, False)
    assert "".join(said) == f"openelm-mlx {__version__}\n"
    (tmp_path / "model").mkdir()
    said.clear()
    assert run_verb(["inspect", "model"], tmp_path, said.append) == Ending(2, False)
    assert "".join(said).startswith("error: model: ")


def test_what_lies_in_the_folder_is_not_imported(tmp_path: Path) -> None:
    for name in ("typer", "rich", "openelm_mlx"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(3)")
    assert run_verb(["--version"], tmp_path, lambda piece: None).status == 0


def test_output_comes_while_it_runs_in_order_and_as_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    instead(
        monkeypatch,
        "import sys, time\nfor i in range(3):\n print('é', end=''); print(i, file=sys.stderr); time.sleep(0.2)",
    )
    said: list[tuple[float, str]] = []
    assert run_verb([], tmp_path, lambda piece: said.append((time.monotonic(), piece))) == Ending(0, False)
    assert "".join(piece for _, piece in said) == "é0\né1\né2\n"
    assert said[-1][0] - said[0][0] > 0.3


def test_it_is_no_terminal_whatever_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    instead(
        monkeypatch,
        "from rich.console import Console; c = Console(); print(c.is_terminal, c.is_interactive); c.print('[red]x')",
    )
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.setenv(name, "1")
    said: list[str] = []
    run_verb([], tmp_path, said.append)
    assert "".join(said) == "False False\nx\n"


def test_after_its_time_it_is_asked_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    instead(
        monkeypatch,
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved'), sys.exit(143)))\n"
        "print('going'); time.sleep(60)",
    )
    said: list[str] = []
    start = time.monotonic()
    assert run_verb([], tmp_path, said.append, limit=1.5) == Ending(143, True)
    assert "".join(said) == "going\nsaved\n"
    assert 1.5 <= time.monotonic() - start < 30


def test_within_its_time_it_is_left_alone(tmp_path: Path) -> None:
    assert run_verb(["--version"], tmp_path, lambda piece: None, limit=60) == Ending(0, False)


def test_whatever_ends_the_wait_ends_it_and_all_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    instead(
        monkeypatch,
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(os.getpid(), other.pid, flush=True); time.sleep(60)",
    )
    said = ""

    def hear(piece: str) -> None:
        nonlocal said
        said += piece
        if "\n" in said:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_verb([], tmp_path, hear)
    own, other = map(int, said.split())
    eventually(lambda: gone(own) and gone(other))


def test_ctrl_c_is_not_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a session of its own, so that what the terminal sends to all goes to the tour alone."""
    instead(monkeypatch, "import os; print(os.getsid(0) == os.getpid())")
    said: list[str] = []
    run_verb([], tmp_path, said.append)
    assert "".join(said) == "True\n"
