"""Stop strings: whatever pieces the text comes in, the result is that of reading it character by character."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openelm_mlx.errors import OpenELMError
from openelm_mlx.stopping import StopStrings

STRINGS = st.text("abc", min_size=1, max_size=5)


def run(stops: Iterable[str], pieces: Iterable[str]) -> tuple[str, bool]:
    watcher, shown = StopStrings(stops), ""
    for piece in pieces:
        text, stopped = watcher.feed(piece)
        shown += text
        if stopped:
            return shown, True
    return shown + watcher.flush(), False


def first_complete(stops: list[str], text: str) -> tuple[str, bool]:
    """The definition, written naively: the shortest beginning of the text that ends in a stop string."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


@given(st.lists(STRINGS, max_size=4), st.lists(st.text("abcd", max_size=4), max_size=12))
def test_equals_the_definition_for_any_pieces(stops: list[str], pieces: list[str]) -> None:
    assert run(stops, pieces) == first_complete(stops, "".join(pieces))


@given(st.lists(STRINGS, min_size=1, max_size=4), st.text("abcd", max_size=20))
def test_nothing_of_a_stop_string_is_shown_early(stops: list[str], text: str) -> None:
    watcher, shown = StopStrings(stops), ""
    expected, stopped = first_complete(stops, text)
    for char in text:
        piece, done = watcher.feed(char)
        shown += piece
        assert not stopped or expected.startswith(shown)
        if done:
            break
    assert watcher.stopped == stopped


def test_text_that_only_looks_like_a_stop_string_comes_out() -> None:
    watcher = StopStrings(["</s>"])
    assert watcher.feed("a </") == ("a ", False)
    assert watcher.feed("p>") == ("</p>", False)
    assert watcher.feed(" <") == (" ", False)
    assert watcher.flush() == "<"


def test_overlapping_stop_strings() -> None:
    assert run(["abcd", "c"], ["ab", "cd"]) == ("ab", True)
    assert run(["abcd", "c"], ["abcd"]) == ("ab", True)
    assert run(["bc", "abc"], ["xabc"]) == ("x", True)
    assert run(["aab"], ["a", "a", "a", "b"]) == ("a", True)


def test_after_the_stop_nothing_more() -> None:
    watcher = StopStrings("stop")  # one string, not four
    assert watcher.feed("go stop and more") == ("go ", True)
    assert watcher.feed("text") == ("", True)
    assert watcher.flush() == ""


def test_no_stop_strings_hold_nothing_back() -> None:
    assert StopStrings().feed("text") == ("text", False)


@pytest.mark.parametrize("stops", [[""], "", ["a", ""], [3], [None]])
def test_empty_and_strange_stop_strings_are_refused(stops: list[str]) -> None:
    with pytest.raises(OpenELMError, match="stop string"):
        StopStrings(stops)


def test_what_is_no_stop_string_is_refused() -> None:
    with pytest.raises(OpenELMError, match="stop strings are"):
        StopStrings(5)  # type: ignore[arg-type]
