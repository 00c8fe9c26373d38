"""Write docs/cli.md from the command line itself: ``python docs/make_cli.py`` (``--check`` only compares)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import typer

from openelm_mlx.cli import VERBS, app

PAGE = Path(__file__).parent / "cli.md"

Row = tuple[str, str, str]
"""What is typed, what it is for, and its default."""


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
    also = [f"It has verbs of its own: {', '.join(n for n, _ in _verbs(command))}."] if _verbs(command) else []
    parts = [f"{'#' * (name.count(' ') + 2)} `openelm {name}`", f"    {usage}", _paragraphs(command.help), *also]
    panels: dict[str | None, list[Row]] = {None: [(f"`{p.name.upper()}`", p.help, "") for p in arguments]}
    for option in options:
        panels.setdefault(getattr(option, "rich_help_panel", None), []).append(_row(option))
    return "\n\n".join([*parts, *(_table(title, rows) for title, rows in panels.items() if rows)])


def _table(title: str | None, rows: list[Row]) -> str:
    head = [f"{title}:", ""] if title else []
    return "\n".join([*head, "| | | default |", "| --- | --- | --- |", *(f"| {a} | {b} | {c} |" for a, b, c in rows)])


def _row(option: Any) -> Row:
    names = ", ".join(f"`{n}`" for n in [*sorted(option.opts, key=len, reverse=True), *option.secondary_opts])
    if option.required:
        default = "required"
    elif isinstance(option.show_default, str):  # what stands for an option that was not given
        default = f"`{option.show_default}`"
    elif option.is_flag or option.default in (None, (), []):
        default = ""
    else:
        default = f"`{option.default}`"
    choices = option.metavar if option.metavar and option.metavar.islower() and "|" in option.metavar else ""
    return names, " ".join([option.help, *([f"({choices.replace('|', ', ')})"] if choices else [])]), default


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
