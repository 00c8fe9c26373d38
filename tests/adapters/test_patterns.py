"""Patterns for layers' names: which are taken, and which could hang."""

from __future__ import annotations

import re

import pytest

from openelm_mlx.adapters.patterns import layer_pattern
from openelm_mlx.errors import OpenELMError


@pytest.mark.parametrize(
    "text",
    [
        "qkv_proj",
        r".*layers\.[02]\.(attn|ffn)\..*",
        r"(.*\.)?proj_1",
        r"(?:proj_\d)+",
        r"(layers\.\d+\.)?attn",
        r"(\d{2}\.)+x",
        r"[(.+)+]\(.+\)+",
        "x" * 200,
    ],
)
def test_taken(text: str) -> None:
    assert layer_pattern(text) == re.compile(text)


@pytest.mark.parametrize(
    "text",
    [
        "(.+)+!",
        "(.*)*!",
        "(?:.+)+!",
        "(?P<a>.+)+!",
        "(.+?){2,}?!",
        "((x|.+)y?)*!",
        "(x?)+!",
        "((.+){1})+!",
        "(?i:(?=.+)x)*!",
        "a|(b(.+)*c)*!",
        "(?x)(.+) # comment\n+!",
        "(.+)(?#comment)+!",
        "(.)(?(1)(.+)+|x)!",
        "(.+){30}!",
    ],
)
def test_a_repetition_of_a_repetition(text: str) -> None:
    with pytest.raises(OpenELMError) as error:
        layer_pattern(text)
    assert str(error.value).startswith(f"{text!r} repeats a group that has a repetition in it")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["(", "*", "a{99999999999999999999}", "[z-a]"])
def test_no_regular_expression(text: str) -> None:
    with pytest.raises(OpenELMError, match="is neither a layer's name nor a regular expression: "):
        layer_pattern(text)


def test_too_long() -> None:
    with pytest.raises(OpenELMError, match=r"^'x{40}\.\.\.' is too long .* over 200 characters$"):
        layer_pattern("x" * 201)


def test_as_part_of_another() -> None:
    pattern = layer_pattern("ab|c", "(x)?({})$")
    assert pattern.match("xc")
    assert not pattern.match("xcc")
