"""How a tour looks: a frame around its beginning and its end, a rule before each step, commands and what they print."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from rich import box
from rich.console import Console, Group
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from openelm_mlx.cli.wrapped import Wrapped

_WIDEST = 96
"""Columns; longer lines are hard to read."""
_INDENT = 2
_CUT = "..."


class Stage:
    """Everything that is shown goes through here, to standard output unless another `console` is given."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, emoji=False, markup=False)
        self._console.width = min(self._console.width, _WIDEST)

    def frame(self, title: str, text: str, facts: Mapping[str, str]) -> None:
        """A frame with a paragraph, and facts by their labels below it."""
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim")
        for label, fact in facts.items():
            grid.add_row(label, fact)
        self._console.print()
        self._console.print(
            Panel(Group(text, "", grid), title=Text(title, "bold"), title_align="left", padding=(1, 2), style="")
        )

    def step(self, number: int, title: str) -> None:
        """The beginning of a step."""
        self._console.print()
        self._console.rule(Text(f"{number}  {title}", "bold"), align="left", style="dim")

    def say(self, text: str) -> None:
        """A paragraph."""
        self._console.print()
        with self._wrapped(0) as paragraph:
            paragraph.add(text)

    def command(self, arguments: Sequence[str]) -> None:
        """A command as it is typed; the terminal itself wraps it, so that it can be copied."""
        self._console.print()
        line = Text.assemble(("$ ", "dim"), (shlex.join(["openelm", *arguments]), "bold cyan"))
        self._console.print(line, soft_wrap=True)

    def quote(self, lines: Sequence[str]) -> None:
        """Lines of a file, cut off at the edge."""
        self._console.print()
        room = max(self._console.width - _INDENT, len(_CUT))
        for line in lines:
            shown = line if len(line) <= room else line[: room - len(_CUT)] + _CUT
            self._write(f"{' ' * _INDENT}{shown}\n")

    def output(self) -> AbstractContextManager[Wrapped]:
        """What takes a command's output as it comes."""
        return self._wrapped(_INDENT)

    def waiting(self, text: str) -> AbstractContextManager[object]:
        """On a terminal, a line that says what is being done as long as the block lasts."""
        return self._console.status(text) if self._console.is_interactive else nullcontext()

    def table(self, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Figures; the first column holds names."""
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
        for n, heading in enumerate(headings):
            table.add_column(heading, justify="right" if n else "left", overflow="fold")
        for row in rows:
            table.add_row(*row)
        self._console.print()
        self._console.print(Padding(table, (0, 0, 0, _INDENT), expand=False))

    def commands(self, lines: Sequence[tuple[str, str]]) -> None:
        """What each command does, and the command."""
        for what, command in lines:
            self._console.print()
            self._console.print(Text(f"# {what}", "dim"))
            self._console.print(Text(command, "bold cyan"), soft_wrap=True)

    @contextmanager
    def _wrapped(self, indent: int) -> Iterator[Wrapped]:
        wrapped = Wrapped(self._write, self._console.width, indent)
        try:
            yield wrapped
        finally:
            wrapped.end()

    def _write(self, text: str) -> None:
        self._console.print(Text(text, end=""), soft_wrap=True, end="")
