"""Results: what was measured, on what, by which command; as a JSON file that is written whole and checked when read."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from openelm_mlx import files
from openelm_mlx.benchmarks.bandwidth import Bandwidth
from openelm_mlx.benchmarks.peers.base import STOCK
from openelm_mlx.benchmarks.protocol import Spread, Timing
from openelm_mlx.benchmarks.roofline import Roofline
from openelm_mlx.errors import OpenELMError
from openelm_mlx.machine import slug, without_home
from openelm_mlx.writer import write_json

VERSION = 1
"""Of the file's form."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """The speed of one program with one model: a line of the table."""

    peer: str
    """The program: ``openelm-mlx``, ``mlx-lm``, ..."""
    variant: str = STOCK
    """How it was set up."""
    model: str
    precision: str
    prompt_tokens: int
    gen_tokens: int
    prompt_tps: Spread
    """Prompt tokens a second."""
    generation_tps: Spread
    """Tokens a second after the first."""
    total_tps: Spread
    """Prompt and generated tokens over the whole time."""
    weight_bytes: int | None = None
    """Bytes of weights read for a token; None here and below: not known of this program."""
    kv_bytes_per_token: int | None = None
    """Bytes of keys and values of one position."""
    ceiling_tps: float | None = None
    """Tokens a second after the first that the machine's bandwidth allows."""
    share: float | None = None
    """Generation speed as a part of that."""
    dispatches: int | None = None
    """Primitives dispatched a decode step."""
    peak_memory_gb: float | None = None

    @classmethod
    def of(cls, timings: Sequence[Timing], *, bandwidth: Bandwidth | None = None, **facts: Any) -> Row:
        """The row of some runs of the same length, with its ceiling where the bytes and the bandwidth are known.

        Args:
            timings: one or more.
            bandwidth: the machine's.
            facts: the other fields.
        """
        row = cls(
            prompt_tokens=timings[0].prompt_tokens,
            # Fewer than were asked for, and not the same number each time, when a time limit stopped the runs.
            gen_tokens=statistics.median_low(t.gen_tokens for t in timings),
            prompt_tps=Spread.of([t.prompt_tps for t in timings]),
            generation_tps=Spread.of([t.generation_tps for t in timings]),
            total_tps=Spread.of([t.total_tps for t in timings]),
            **facts,
        )
        if bandwidth is None or row.weight_bytes is None or row.kv_bytes_per_token is None:
            return row
        roofline = Roofline(row.weight_bytes, row.kv_bytes_per_token, bandwidth)
        ceiling = roofline.generation_ceiling(row.prompt_tokens, row.gen_tokens)
        return dataclasses.replace(row, ceiling_tps=ceiling, share=row.generation_tps.median / ceiling)

    @property
    def program(self) -> str:
        """Peer and variant, for people."""
        return self.peer if self.variant == STOCK else f"{self.peer} ({self.variant})"

    @property
    def task(self) -> tuple[str, str, int, int]:
        """What was run."""
        return self.model, self.precision, self.prompt_tokens, self.gen_tokens

    @property
    def key(self) -> tuple[str, str, str, str, int, int]:
        """What a row of another result must have in common with this one to be compared with it."""
        return self.peer, self.variant, *self.task


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """How many times as fast one program is as another one."""

    model: str
    precision: str
    prompt_tokens: int
    gen_tokens: int
    program: str
    to: str
    """The other program."""
    prompt: Spread
    generation: Spread
    total: Spread


def ratios(rows: Sequence[Row], peer: str) -> tuple[Ratio, ...]:
    """The rows of `peer` to every other program's row of the same task; run by run, since they were run in turn.

    One result asks all of its programs for the same number of tokens; a time limit may have given some of them fewer.
    """
    return tuple(
        Ratio(
            model=row.model,
            precision=row.precision,
            prompt_tokens=row.prompt_tokens,
            gen_tokens=row.gen_tokens,
            program=row.program,
            to=other.program,
            prompt=_ratio(row.prompt_tps, other.prompt_tps),
            generation=_ratio(row.generation_tps, other.generation_tps),
            total=_ratio(row.total_tps, other.total_tps),
        )
        for row in rows
        for other in rows
        if row.peer == peer != other.peer and row.task[:3] == other.task[:3]
    )


def _ratio(a: Spread, b: Spread) -> Spread:
    return a / b if len(a.values) == len(b.values) else Spread.of([a.median / b.median])


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


@dataclass(frozen=True, kw_only=True)
class Result:
    """Everything one run of ``openelm bench`` found out."""

    version: int = VERSION
    name: str
    """What was measured, for the file's name: a suite or a model."""
    command: tuple[str, ...]
    """See :func:`shown_command`."""
    time: str = field(default_factory=_now)
    """When, UTC, ISO 8601."""
    machine: dict[str, Any]
    """See :func:`openelm_mlx.machine.machine`."""
    protocol: dict[str, Any]
    """The fields of :class:`~openelm_mlx.benchmarks.protocol.Protocol`."""
    bandwidth: Bandwidth | None = None
    rows: tuple[Row, ...] = ()
    ratios: tuple[Ratio, ...] = ()
    notes: tuple[str, ...] = ()
    """Lines a reader of the figures must know: a busy machine, a peer that was not there."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Other sections by name, as plain values."""

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any], where: str) -> Result:
        """The inverse of :meth:`to_json`; `where` is named in errors.

        Raises:
            OpenELMError: the values are not those of a result, or of another version of this program.
        """
        version = values.get("version")
        if version != VERSION or isinstance(version, bool):
            said = "version is missing" if "version" not in values else f"version is {version!r}, not {VERSION}"
            raise OpenELMError(f"{where}: not a result that this version of openelm bench wrote: {said}")
        return _build(cls, values, where, "")


def load(path: Path) -> Result:
    """Read a stored result.

    Raises:
        OpenELMError: there is no such file, or it is something else; file and key are named.
    """
    return Result.from_json(files.read_json(path, OpenELMError), str(path))


def save(result: Result, path: Path) -> None:
    """Write a result; missing folders are made, an existing file is replaced, and nothing half-written is ever left.

    Raises:
        OpenELMError: it cannot be written.
    """
    save_json(result.to_json(), path)


def check_place(path: Path) -> None:
    """Refuse a file that :func:`save` could not write, before hours are spent on what it is to hold.

    Raises:
        OpenELMError: it is a folder, a device or the like, or its folder cannot be written.
    """
    path = _real_file(path)
    _check_folder(path.parent, path)


def check_folder(folder: Path) -> None:
    """Refuse a folder in which no file can be made, as :func:`check_place` does."""
    _check_folder(folder, folder)


def _check_folder(folder: Path, named: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        Path(tempfile.mkdtemp(prefix=".", dir=folder)).rmdir()
    except OSError as e:
        raise OpenELMError(f"{named}: cannot be written: {e.strerror or e}") from None


def _real_file(path: Path) -> Path:
    """Where a link leads; what is there must not be a folder, a device or the like, which replacing would destroy."""
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        raise OpenELMError(f"{path}: is no file, and will not be replaced; name another one")
    return path


def save_json(found: Any, path: Path) -> None:
    """Write plain values as :func:`save` does."""
    path = _real_file(path)
    # Names of folders may hold bytes that are no text in any encoding.
    values = json.loads(json.dumps(found, ensure_ascii=False).encode("utf-8", "replace"))
    beside: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent)
        written = Path(beside) / path.name
        write_json(written, values)
        written.replace(path)
    except OSError as e:
        raise OpenELMError(f"{path}: the result cannot be written: {e.strerror or e}") from None
    finally:
        if beside:
            shutil.rmtree(beside, ignore_errors=True)


def shown_command(arguments: Sequence[str]) -> tuple[str, ...]:
    """The command that `arguments` (sys.argv without the program) make, the user's home folder written as ``~``."""
    readable = (os.fsencode(argument).decode("utf-8", "replace") for argument in arguments)
    return ("openelm", *map(without_home, readable))


def default_folder() -> Path:
    """Where results are kept unless somebody says otherwise: in the user's data folder.

    Raises:
        OpenELMError: the user has no home folder.
    """
    if sys.platform == "darwin":
        data = files.expand("~/Library/Application Support")
    else:
        named = os.environ.get("XDG_DATA_HOME", "")
        # A relative one is to be ignored (XDG Base Directory Specification).
        data = Path(named) if Path(named).is_absolute() else files.expand("~/.local/share")
    return data / "openelm-mlx" / "benchmarks"


def default_path(result: Result, folder: Path, *, dated: bool = True) -> Path:
    """The result's file in `folder`, named by chip, system, what was measured and, if `dated`, when."""
    name = re.sub(r"[^\w.]+", "-", Path(result.name).name, flags=re.ASCII).strip("-.")
    when = re.sub(r"[-:]|\+.*", "", result.time)
    return folder / f"{slug(result.machine)}-{name or 'model'}{f'-{when}' if dated else ''}.json"


# Reading: a value must have the kind that its field is annotated with.


def _build(cls: Any, values: Any, where: str, place: str) -> Any:
    """A dataclass from a JSON object; `place` is the object's own key and a dot, or nothing."""
    if not isinstance(values, dict):
        raise OpenELMError(f"{where}: {place.rstrip('.')} must be an object, not {_shown(values)}")
    fields: dict[str, Any] = {}
    for f in dataclasses.fields(cls):
        if f.name not in values:
            raise OpenELMError(f"{where}: {place}{f.name} is missing: not a result of openelm bench")
        kind, value = str(f.type), values[f.name]
        optional = kind.endswith(" | None")
        if not (optional and value is None):
            value = _KINDS[kind.removesuffix(" | None")](value, where, place + f.name)
        fields[f.name] = value
    return cls(**fields)


def _plain(kind: type, words: str) -> Callable[[Any, str, str], Any]:
    def read(value: Any, where: str, key: str) -> Any:
        if not isinstance(value, kind) or isinstance(value, bool):
            raise OpenELMError(f"{where}: {key} must be {words}, not {_shown(value)}")
        return value

    return read


def _whole(value: Any, where: str, key: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise OpenELMError(f"{where}: {key} must be a whole number, not {_shown(value)}")
    return value


def _number(value: Any, where: str, key: str) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    with suppress(OverflowError):
        if number and math.isfinite(value) and value > 0:
            return float(value)
    raise OpenELMError(f"{where}: {key} must be a number above 0, not {_shown(value)}")


def _spread(value: Any, where: str, key: str) -> Spread:
    values = value.get("values") if isinstance(value, dict) else None
    if not isinstance(values, list) or not values:
        raise OpenELMError(f"{where}: {key}.values must be a list of measurements, not {_shown(values)}")
    return Spread.of([_number(v, where, f"{key}.values.{i}") for i, v in enumerate(values)])


def _list(read: Callable[[Any, str, str], Any]) -> Callable[[Any, str, str], Any]:
    def read_all(value: Any, where: str, key: str) -> Any:
        if not isinstance(value, list):
            raise OpenELMError(f"{where}: {key} must be a list, not {_shown(value)}")
        return tuple(read(v, where, f"{key}.{i}") for i, v in enumerate(value))

    return read_all


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


_text = _plain(str, "a text")

_KINDS: dict[str, Callable[[Any, str, str], Any]] = {
    "str": _text,
    "int": _whole,
    "float": _number,
    "Spread": _spread,
    "Bandwidth": lambda value, where, key: _build(Bandwidth, value, where, f"{key}."),
    "dict[str, Any]": _plain(dict, "an object"),
    "tuple[str, ...]": _list(_text),
    "tuple[Row, ...]": _list(lambda value, where, key: _build(Row, value, where, f"{key}.")),
    "tuple[Ratio, ...]": _list(lambda value, where, key: _build(Ratio, value, where, f"{key}.")),
}
"""Annotation of a field -> what reads its value."""
