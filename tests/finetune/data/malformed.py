"""Data files that have something wrong with them, and the one line that says what."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from typing import Any

SKIP = "; --skip-bad-lines counts such lines instead"
SHAPES = "the shapes there are: text; prompt and completion; messages; instruction and output (and input)"
FORMS = "JSON Lines (one object a line) or one JSON array of objects is needed"


@dataclass(frozen=True)
class Malformed:
    """A file and what is said about it."""

    name: str
    data: bytes
    message: str
    """After the file's path; a `*` stands for words that are the JSON or gzip library's own."""
    skippable: bool = False
    """Whether --skip-bad-lines helps."""


def line(*records: Any) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def bad(name: str, data: bytes, message: str) -> Malformed:
    """A file in which one line, or one entry, is wrong."""
    return Malformed(name, data, message + SKIP, skippable=True)


def chat(*turns: tuple[Any, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


GOOD = line({"text": "Alice was reading."}, {"text": "Once upon a time."})
PACKED = gzip.compress(GOOD * 300, mtime=0)

MALFORMED = [
    Malformed("empty.jsonl", b"", ": no example is left for train: it is empty"),
    Malformed("blank.jsonl", b"\n  \n\r\n", ": no example is left for train: it is empty"),
    Malformed("no-entries.json", b"[ ]", ": no example is left for train: it is empty"),
    Malformed(
        "nothing-in-them.jsonl",
        line({"text": ""}, {"text": " \n"}, {"prompt": "Hi", "completion": ""}),
        ": no example is left for train: 3 records left out, with no text to learn",
    ),
    # Not JSON
    bad("csv.jsonl", b"prompt,completion\nHi,there\n", ":1: begins no JSON object: 'prompt,completion'"),
    bad("half-a-line.jsonl", GOOD + b'{"text": "Once upo', ":3: the line ends before its JSON object does"),
    bad(
        "indented.jsonl",
        json.dumps({"text": "Once"}, indent=2).encode(),
        ":1: the line ends before its JSON object does",
    ),
    bad("quotes.jsonl", GOOD + b"\n{'text': 'Once'}\n", ":4: not readable as JSON: * (column 2)"),
    bad("two-objects.jsonl", b'{"text": "a"} {"text": "b"}\n', ":1: not readable as JSON: extra data (column 15)"),
    bad(
        "latin-1.jsonl",
        GOOD + '{"text": "café"}\n'.encode("latin-1"),
        ":3: not UTF-8 text: byte 0xe9 at byte 14 of the line",
    ),
    bad("nested.jsonl", b'{"text": ' * 100_000, ":1: nested too deep"),
    Malformed("utf-16.jsonl", GOOD.decode().encode("utf-16"), f": is UTF-16 text, where UTF-8 is needed; {FORMS}"),
    Malformed("parquet.jsonl", b"PAR1\x15\x04\x15", f": is a Parquet file; {FORMS}"),
    Malformed("page.json", b"<!DOCTYPE html>\n<html>", f": is a web page; {FORMS}"),
    Malformed(
        "pointer.jsonl",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n",
        f": is a Git LFS pointer (fetch the file itself with `git lfs pull`); {FORMS}",
    ),
    # Arrays
    Malformed(
        "cut-off.json",
        b'[\n{"text": "a"},\n{"text": "b"}\n',
        ":4: the array cannot be read after its entry 2: the text ends inside the array",
    ),
    Malformed(
        "no-comma.json",
        b'[{"text": "a"}\n {"text": "b"}]',
        ":2: the array cannot be read after its entry 1: a comma or ] is needed, not '{'",
    ),
    Malformed(
        "last-comma.json",
        b'[{"text": "a"},\n]',
        ":2: the array cannot be read after its entry 1: not readable as JSON: * (column 1)",
    ),
    Malformed(
        "array-a-line.jsonl",
        b'[{"text": "a"}]\n[{"text": "b"}]\n',
        ":2: the array cannot be read after its entry 1: there is more after the array's end",
    ),
    Malformed(
        "latin-1.json",
        '[{"text": "a"},\n{"text": "é"}]'.encode("latin-1"),
        ":2: not UTF-8 text: byte 0xe9 at byte 11 of the line",
    ),
    bad("strings.json", b'[\n"Once upon a time",\n"Alice"]', ":2 (entry 1): a JSON object is needed, not a string"),
    # gzip
    Malformed("cut-off.jsonl.gz", PACKED[: len(PACKED) // 2], ":*: the gzip data is damaged from here on: *"),
    Malformed(
        "damaged.jsonl.gz", PACKED[:20] + b"\x00" * 20 + PACKED[40:], ":1: the gzip data is damaged from here on: *"
    ),
    # Shapes
    bad("numbers.jsonl", b"1\n", ":1: a JSON object is needed, not a number"),
    bad("null.jsonl", GOOD + b"null\n", ":3: a JSON object is needed, not null"),
    bad("no-keys.jsonl", b"{}\n", f":1: is an empty object; {SHAPES}"),
    bad(
        "other-keys.jsonl",
        line({"question": "a", "answer": "b"}),
        f":1: has none of the keys needed, but 'question', 'answer'; {SHAPES}",
    ),
    bad("capital.jsonl", line({"Text": "a"}), f":1: has none of the keys needed, but 'Text'; {SHAPES}"),
    bad(
        "two-shapes.jsonl",
        line({"text": "a", "prompt": "b", "completion": "c"}),
        ":1: has keys of several shapes (text; prompt and completion); leave those of one",
    ),
    bad("no-completion.jsonl", line({"prompt": "a", "response": "b"}), ":1: has 'prompt' but no 'completion'"),
    bad(
        "no-output.json",
        json.dumps([{"instruction": "a", "input": "b"}]).encode(),
        ":1 (entry 1): has 'instruction' but no 'output'",
    ),
    # Values
    bad("text-null.jsonl", GOOD + line({"text": None}), ":3: 'text' must be text, not null"),
    bad("text-list.jsonl", line({"text": ["a"]}), ":1: 'text' must be text, not an array"),
    bad(
        "completion-number.jsonl",
        line({"prompt": "2+2", "completion": 4}),
        ":1: 'completion' must be text, not a number",
    ),
    bad(
        "input-null.jsonl",
        line({"instruction": "a", "input": None, "output": "b"}),
        ":1: 'input' must be text, not null",
    ),
    bad(
        "half-messages.jsonl",
        line({"prompt": [{"role": "user", "content": "a"}], "completion": "b"}),
        ":1: 'prompt' and 'completion' must be both text or both lists of messages, not an array and a string",
    ),
    # Messages
    bad("messages-text.jsonl", line({"messages": "Hi"}), ":1: 'messages' must be a list of messages, not a string"),
    bad(
        "messages-none.jsonl",
        line({"messages": []}),
        ":1: 'messages': there are no messages: a chat needs at least one",
    ),
    bad(
        "no-reply.jsonl",
        line(chat(("user", "Hi"))),
        ":1: 'messages' has no turn of the assistant, so there is nothing to learn",
    ),
    bad(
        "empty-reply.jsonl",
        line(chat(("user", "Hi"), ("assistant", " "))),
        ":1: 'messages': message 1, a turn of the assistant, is empty",
    ),
    bad(
        "role.jsonl",
        line(chat(("human", "Hi"), ("assistant", "Hello"))),
        ":1: 'messages': message 0 has the role 'human'; there are system, user, assistant, tool",
    ),
    bad(
        "no-role.jsonl",
        line({"messages": [{"from": "human", "value": "Hi"}]}),
        ":1: 'messages': message 0 must have a role that is a string, not None",
    ),
    bad(
        "content-null.jsonl",
        line(chat(("user", "Hi"), ("assistant", None))),
        ":1: 'messages': message 1 must have content that is text, not NoneType",
    ),
    bad(
        "picture.jsonl",
        line(chat(("user", [{"type": "image_url"}]), ("assistant", "A cat."))),
        ":1: 'messages': message 0 has a content part that is not text (image_url); only text is supported",
    ),
]
