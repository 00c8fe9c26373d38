"""Running ``openelm generate`` in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.cli import Done, run

PROMPT = "Once upon"


def generate(model: Path, *options: str, prompt: str = PROMPT, tokens: int = 12, stdin: bytes = b"") -> Done:
    return run("generate", "--model", model, "--prompt", prompt, "--max-tokens", str(tokens), *options, stdin=stdin)


def as_json(model: Path, *options: str, **more: Any) -> dict[str, Any]:
    done = generate(model, *options, "--json", **more)
    assert (done.status, done.out.count("\n")) == (0, 1), done.err
    values: dict[str, Any] = json.loads(done.out)
    return values


def tokens(model: Path, *options: str, **more: Any) -> list[int]:
    found: list[int] = as_json(model, *options, **more)["tokens"]
    return found
