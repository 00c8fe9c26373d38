"""Text that arrives in pieces, wrapped at words while it arrives."""

from __future__ import annotations

from collections.abc import Callable

from rich.cells import cell_len


class Wrapped:
    """Writes indented lines of at most `width` columns; a word appears when its end is there.

    Spaces at the beginning of a line stay, newlines at the end of the text do not. Characters that steer a terminal are
    left out.
    """

    def __init__(self, write: Callable[[str], None], width: int, indent: int) -> None:
        self._write, self._indent = write, indent
        self._width = max(width - indent, 1)
        self._column = 0
        self._spaces = self._word = ""
        self._newlines = 0

    def add(self, piece: str) -> None:
        """The next piece."""
        for character in piece:
            if character == "\n":
                self._end_word()
                self._spaces = ""
                self._newlines += 1
            elif character == " ":
                self._end_word()
                self._spaces += " "
            elif character.isprintable():
                self._word += character

    def end(self) -> None:
        """The text is over."""
        self._end_word()
        if self._column:
            self._write("\n")

    def _end_word(self) -> None:
        if not self._word:
            return
        if self._newlines:
            self._break(self._newlines if self._column else 0)
        length = cell_len(self._word)
        if self._column and self._column + len(self._spaces) + length > self._width:
            self._break(1)
            self._spaces = ""
        if not self._column:
            self._write(" " * self._indent)
        self._write(self._spaces + self._word)
        self._column += len(self._spaces) + length
        self._spaces = self._word = ""

    def _break(self, lines: int) -> None:
        self._write("\n" * lines)
        self._column = self._newlines = 0
