"""How a tour looks, on terminals of several kinds."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from openelm_mlx.cli.stage import Stage

TEXT = "What this program does, shown with a tiny model. Every command is really run, on this machine."
COMMAND = ("generate", "--prompt", "The people of the United States", "--model", "bf16")


def drawn(width: int, encoding: str = "utf-8", **options: Any) -> str:
    """Everything there is, on a console of this width."""
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
    stage = Stage(Console(file=file, width=width, highlight=False, emoji=False, markup=False, **options))
    stage.frame("openelm demo", TEXT, {"model": "2.9 million parameters", "machine": "a processor of some long name"})
    stage.step(1, "Convert")
    stage.say(TEXT)
    stage.quote(['{"prompt": "The merchant marine", "completion": " must wait until the pie has been served."}'])
    with stage.output() as output:
        output.add(TEXT)
    stage.table(("model", "tokens/s"), [("bf16", "1,234"), ("4bit", "56")])
    with stage.waiting("measuring"):
        pass
    return raw.getvalue().decode(encoding)


@pytest.mark.parametrize("width", [30, 44, 80])
def test_nothing_is_wider_than_the_terminal(width: int) -> None:
    lines = drawn(width).splitlines()
    assert max(map(cell_len, lines)) == width
    assert "\x1b" not in "".join(lines)


def test_long_lines_end_where_they_can_still_be_read() -> None:
    assert max(map(len, drawn(250).splitlines())) == 96


def test_a_terminal_has_colours_unless_it_is_asked_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = {"force_terminal": True, "color_system": "truecolor", "force_interactive": False}

    def command(**options: Any) -> str:
        file = io.StringIO()
        Stage(Console(file=file, width=80, **options)).command(COMMAND)
        return file.getvalue()

    assert re.search(r"\x1b\[[\d;]*36m", command(**terminal))
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[\d;]*3\dm", command(**terminal))


def test_a_terminal_that_is_not_utf8_gets_ascii() -> None:
    assert drawn(80, "latin-1").isascii()


def test_a_command_is_one_line_however_narrow_the_terminal_is() -> None:
    file = io.StringIO()
    stage = Stage(Console(file=file, width=20))
    stage.command(COMMAND)
    stage.commands([("Apple's weights", "openelm convert apple/OpenELM-270M-Instruct --out openelm-270m")])
    assert file.getvalue().splitlines() == [
        "",
        "$ openelm generate --prompt 'The people of the United States' --model bf16",
        "",
        "# Apple's weights",
        "openelm convert apple/OpenELM-270M-Instruct --out openelm-270m",
    ]


def test_figures_are_aligned() -> None:
    rows = [line for line in drawn(80).splitlines() if "bf16" in line or "4bit" in line]
    assert [row.rstrip() for row in rows] == ["  bf16       1,234", "  4bit          56"]
