"""Small runs for tests: a converted model with the tests' tokenizer, a data file, and the command line."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from openelm_mlx.finetune.metrics import read_metrics
from tests.support.cli import Done, run, start

Line = dict[str, Any]

SMALL = (
    "--max-length=24",
    "--batch-size=2",
    "--packing=off",
    "--valid-fraction=0",
    "--learning-rate=0.003",
    "--no-plot",
    "--quiet",
)

LONG = (
    "--steps=24",
    "--accumulation=2",
    "--dropout=0.2",
    "--valid-fraction=0.25",
    "--eval-every=6",
    "--save-every=4",
    "--shuffle-window=2",
)
"""A run with everything that its state consists of."""


def write_data(path: Path, count: int = 12) -> Path:
    """Short texts, all different."""
    words = ("Alice", "was", "reading", "a", "book", "about", "the", "white", "rabbit", "once", "upon", "time")
    texts = [" ".join(words[(n * 3 + k) % len(words)] for k in range(3 + n % 5)) + f" {n}." for n in range(count)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def arguments(model: Path, data: Path, out: Path, *more: str) -> list[str]:
    """Of a small run."""
    return ["finetune", "--model", str(model), "--data", str(data), "--out", str(out), *SMALL, *more]


def train(model: Path, data: Path, out: Path, *more: str) -> Done:
    """Make a small run, which must end well."""
    done = run(*arguments(model, data, out, *more))
    assert done.status == 0, done.err
    return done


def metrics(out: Path) -> list[Line]:
    """What a run recorded, without what depends on the clock."""
    timed = ("seconds", "tokens_per_s", "memory_gb")
    return [{k: v for k, v in line.items() if k not in timed} for line in read_metrics(out / "metrics.jsonl")]


def updates(lines: Sequence[Line]) -> list[Line]:
    """The lines of updates."""
    return [line for line in lines if "grad_norm" in line]


def listing(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def refused(*given: str | Path, out: Path | None = None) -> str:
    """The one line that it says; nothing is left behind."""
    done = run(*given)
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1, done.err
    if out is not None:
        assert not out.exists()
        assert not [p for p in out.parent.iterdir() if p.name.startswith(f".{out.name}")]
    return done.err.removeprefix("error: ").rstrip("\n")


@contextmanager
def started(*given: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of its own, which is gone afterwards."""
    process = start(*given)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(out: Path, lines: int, timeout: float = 300) -> None:
    """Until that many lines of metrics are there."""
    path, end = out / "metrics.jsonl", time.monotonic() + timeout
    while time.monotonic() < end:
        if path.exists() and path.read_bytes().count(b"\n") >= lines:
            return
        time.sleep(0.002)
    raise AssertionError(f"{out}: never got {lines} lines")
