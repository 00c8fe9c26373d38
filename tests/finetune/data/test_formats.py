"""Records to examples: the keys decide. What is refused is in malformed.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from openelm_mlx.finetune.data.formats import Chat, Completion, Example, Instruction, Text, example_of
from openelm_mlx.finetune.data.pairs import preference_of

USER, ASSISTANT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("values", "example"),
    [
        ({"text": "Once"}, Text("Once")),
        ({"text": "Once", "id": 7, "answer": None, "input": 3}, Text("Once")),
        ({"prompt": "2+2=", "completion": "4"}, Completion("2+2=", "4")),
        ({"prompt": "", "completion": "4", "output": "x"}, Completion("", "4")),
        ({"instruction": "Add", "input": "2 2", "output": "4", "answer": "4"}, Instruction("Add", "2 2", "4")),
        ({"instruction": "Add", "output": "4"}, Instruction("Add", "", "4")),
        ({"messages": [USER, ASSISTANT]}, Chat((USER, ASSISTANT))),
        ({"messages": [SYSTEM, USER, ASSISTANT, USER]}, Chat((SYSTEM, USER, ASSISTANT, USER))),
        ({"prompt": [USER], "completion": [ASSISTANT]}, Chat((USER, ASSISTANT), given=1)),
        (
            {"prompt": [USER, ASSISTANT, USER], "completion": [ASSISTANT]},
            Chat((USER, ASSISTANT, USER, ASSISTANT), given=3),
        ),
    ],
)
def test_keys_decide(values: dict[str, Any], example: Example) -> None:
    assert example_of(values) == example


def test_the_examples_of_the_documentation_are_examples() -> None:
    page = (Path(__file__).parents[3] / "docs" / "data.md").read_text(encoding="utf-8")
    records = [json.loads(line) for line in page.splitlines() if line.startswith("    {")]
    assert [type(example_of(r)) for r in records if "chosen" not in r] == [Text, Completion, Chat, Chat, Instruction]
    preferences = [preference_of(r) for r in records if "chosen" in r]
    assert [type(p.chosen) for p in preferences] == [type(p.rejected) for p in preferences] == [Completion, Chat]


def test_text_parts_of_a_message_are_joined_and_part_of_another_shape_is_left_aside() -> None:
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    messages = [{"role": "user", "content": parts}, ASSISTANT]
    assert example_of({"messages": messages, "prompt": "left aside"}) == Chat((USER, ASSISTANT))


def test_other_keys_of_a_message_reach_the_template() -> None:
    named = {**ASSISTANT, "name": "Alice"}
    example = example_of({"messages": [USER, named]})
    assert isinstance(example, Chat)
    assert example.messages == (USER, named)


@pytest.mark.parametrize(
    ("example", "empty"),
    [
        (Text(" \n"), True),
        (Text("."), False),
        (Completion("Hi", "\t"), True),
        (Completion("", "x"), False),
        (Instruction("a", "b", ""), True),
        (Instruction("", "", "x"), False),
        (Chat((USER, ASSISTANT)), False),
    ],
)
def test_what_has_nothing_to_learn(example: Example, empty: bool) -> None:
    assert example.empty is empty
