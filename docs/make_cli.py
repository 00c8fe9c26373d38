"""Write docs/cli.md from the command line itself: ``python docs/make_cli.py`` (``--check`` only compares)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import typer

from openelm_mlx.cli import VERBS, app

PAGE = Path(__file__).parent / "cli.md"


def page() -> str:
    """The whole page."""
    group: Any = typer.main.get_command(app)
    parts = [
        "# Command line",
        "Written by `python docs/make_cli.py` from the commands themselves; a test keeps it in step.",
        *(part for name in VERBS for part in _verb(name, group.get_command(None, name))),
    ]
    return "\n\n".join(parts) + "\n"


def _verb(name: str, command: Any) -> list[str]:
    """The section of a verb, and those of its own verbs."""
    return [_section(name, command), *(part for n, c in _verbs(command) for part in _verb(f"{name} {n}", c))]


def _verbs(command: Any) -> list[tuple[str, Any]]:
    return list(getattr(command, "commands", {}).items())


def _section(name: str, command: Any) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
    usage = " ".join(["openelm", name, *(p.name.upper() for p in arguments), "[OPTIONS]"])
    rows = [(f"`{p.name.upper()}`", p.help, "") for p in arguments] + [_row(p) for p in options]
    table = ["| | | default |", "| --- | --- | --- |", *(f"| {a} | {b} | {c} |" for a, b, c in rows)]
    also = [f"It has verbs of its own: {', '.join(n for n, _ in _verbs(command))}."] if _verbs(command) else []
    parts = [f"{'#' * (name.count(' ') + 2)} `openelm {name}`", f"    {usage}", _paragraphs(command.help), *also]
    return "\n\n".join([*parts, "\n".join(table)])


def _row(option: Any) -> tuple[str, str, str]:
    names = ", ".join(f"`{n}`" for n in sorted(option.opts, key=len, reverse=True))
    if option.required:
        default = "required"
    elif option.is_flag or option.default in (None, (), []):
        default = ""
    else:
        default = f"`{option.default}`"
    return names, option.help, default


def _paragraphs(text: str) -> str:
    return "\n\n".join(" ".join(p.split()) for p in text.split("\n\n"))


def main() -> int:
    """Write the page, or with ``--check`` say whether it is up to date."""
    text = page()
    if "--check" not in sys.argv:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    print(f"{PAGE.name} is out of date; run: python docs/make_cli.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
