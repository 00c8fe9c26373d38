"""Text that arrives in pieces, wrapped at words."""

from __future__ import annotations

import textwrap

import pytest

from openelm_mlx.cli.wrapped import Wrapped

TEXT = "The people of the United States have a right to pie, and so has every sailor of the Navy."


def wrapped(*pieces: str, width: int = 40, indent: int = 2) -> str:
    written: list[str] = []
    text = Wrapped(written.append, width, indent)
    for piece in pieces:
        text.add(piece)
    text.end()
    return "".join(written)


@pytest.mark.parametrize("width", [12, 20, 33, 40, 200])
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_however_it_comes_it_is_wrapped_as_a_whole_text_is(width: int, size: int) -> None:
    pieces = [TEXT[i : i + size] for i in range(0, len(TEXT), size)]
    assert wrapped(*pieces, width=width) == textwrap.indent(textwrap.fill(TEXT, width - 2), "  ") + "\n"


def test_a_word_is_written_once_its_end_is_there() -> None:
    written: list[str] = []
    text = Wrapped(written.append, 40, 2)
    text.add("The peo")
    assert "".join(written) == "  The"
    text.add("ple of")
    assert "".join(written) == "  The people"


def test_lines_keep_their_indents_and_columns() -> None:
    table = "verified:\n  KL divergence     0.1\n  top-1 agreement   90%\n"
    assert wrapped(table) == "  verified:\n    KL divergence     0.1\n    top-1 agreement   90%\n"


def test_empty_lines_stay_between_others_only() -> None:
    assert wrapped("\n\na\n\nb\n", "\n") == "  a\n\n  b\n"
    assert wrapped("") == wrapped("\n \n") == ""


def test_a_long_word_is_not_broken() -> None:
    assert wrapped("a " + "x" * 50 + " b", width=20) == f"  a\n  {'x' * 50}\n  b\n"


def test_wide_characters_count_twice() -> None:
    assert wrapped("模型 模型 模型", width=12, indent=2) == "  模型 模型\n  模型\n"


def test_nothing_steers_the_terminal() -> None:
    assert wrapped("a\x1b[31mb\r\x07c") == "  a[31mbc\n"
