"""OpenELM beside the small families it is compared with: their shapes, and one process after another to measure them.

Every family runs through mlx-lm's own model code, with random weights in its true shapes (speed depends on shapes
alone, so nothing is downloaded); OpenELM through mlx-lm's and through ours. Shapes and sources: ``families.json``.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openelm_mlx.benchmarks.peers.base import OURS, last_line
from openelm_mlx.benchmarks.protocol import Protocol, Spread
from openelm_mlx.benchmarks.table import aligned, number
from openelm_mlx.config import OpenELMConfig
from openelm_mlx.errors import OpenELMError
from openelm_mlx.files import read_json

THEIRS = "mlx-lm"
_DATA = Path(__file__).with_name("families.json")
_WORKER = "openelm_mlx.benchmarks.families_worker"


@dataclass(frozen=True)
class Family:
    """One model of a family, by its shapes."""

    name: str
    module: str
    """mlx-lm's module for it, in ``mlx_lm.models``."""
    config: dict[str, Any]
    """The values of its config.json that decide shapes."""
    source: str
    """Where they are published."""
    parameters: int
    left_out: str | None = None
    """Why mlx-lm's module does not fit it; None if it does."""
    note: str | None = None
    """What a reader of its figures has to know."""


@dataclass(frozen=True)
class FamilyResult:
    """What was measured of one family through one implementation."""

    name: str
    peer: str
    """``mlx-lm`` or ``openelm-mlx``."""
    precision: str
    parameters: int | None
    norm_layers: int | None = None
    """Norm layers, those without weights and those of queries and keys included."""
    weight_bytes: int | None = None
    """Bytes of weights that one token reads."""
    prompt: Spread | None = None
    """Prompt tokens a second."""
    generation: Spread | None = None
    """Generated tokens a second, after the first."""
    left_out: str | None = None
    """Why there are no figures; None if there are."""
    note: str | None = None


def families() -> list[Family]:
    """Every family of ``families.json``, smallest first."""
    return [_family(entry) for entry in read_json(_DATA, OpenELMError)["families"]]


def _family(entry: dict[str, Any]) -> Family:
    values = dict(entry)
    preset = values.pop("preset", None)
    if preset:
        values["config"] = OpenELMConfig.preset(preset).to_dict()
    return Family(**values)


def select(names: Sequence[str] | None = None) -> list[Family]:
    """The families of these names, or all.

    Raises:
        OpenELMError: a name is not known.
    """
    known = {family.name: family for family in families()}
    for name in names or ():
        if name not in known:
            raise OpenELMError(f"no family named {name!r}; there are {', '.join(known)}")
    return list(known.values()) if names is None else [known[name] for name in names]


def measure_families(
    protocol: Protocol, *, precision: str, chosen: Sequence[Family], checkpoints: Sequence[str] = ()
) -> Iterator[FamilyResult]:
    """Measure families one after another, each in a process of its own so that memory and caches start empty.

    All run on the BLAS that this package loads (see :func:`openelm_mlx.device.blas`), mlx-lm's models too: the
    comparison is of families, not of set-ups.

    Args:
        protocol: what is run; its dry run is a short one, in every process.
        precision: of the random weights: ``bf16``, ``fp16``, ``fp32``, ``4bit`` or ``8bit``.
        chosen: see :func:`select`.
        checkpoints: further models, folders or Hub names, loaded and run by mlx-lm with the weights stored there.

    Yields:
        A result as soon as it is there. A family that cannot be run is a result that says why.

    Raises:
        OpenELMError: the precision is not known.
    """
    from openelm_mlx.benchmarks.models import stored_as

    stored_as(precision)
    for family in chosen:
        result = FamilyResult(family.name, THEIRS, precision, family.parameters, note=family.note)
        if family.left_out:
            yield dataclasses.replace(result, left_out=family.left_out)
            continue
        job = {"family": dataclasses.asdict(family), "precision": precision}
        for peer in (THEIRS, OURS) if family.module == "openelm" else (THEIRS,):
            yield _filled(dataclasses.replace(result, peer=peer), job | {"peer": peer}, protocol)
    for checkpoint in checkpoints:
        yield _filled(
            FamilyResult(checkpoint, THEIRS, "stored", None), {"checkpoint": checkpoint, "peer": THEIRS}, protocol
        )


def _filled(result: FamilyResult, job: dict[str, Any], protocol: Protocol) -> FamilyResult:
    """The result with the figures of a process that did the job, or with why there are none."""
    job = job | {"protocol": dataclasses.asdict(protocol)}
    done = subprocess.run([sys.executable, "-m", _WORKER, json.dumps(job)], capture_output=True, text=True, check=False)
    if done.returncode:
        return dataclasses.replace(result, left_out=_last_words(done))
    figures = json.loads(done.stdout.splitlines()[-1])
    figures |= {name: Spread.of(figures[name]) for name in ("prompt", "generation")}
    return dataclasses.replace(result, **figures)


def _last_words(done: subprocess.CompletedProcess[str]) -> str:
    """Why a process failed, on one line."""
    if done.returncode < 0:
        return f"its process was ended by signal {-done.returncode} (9 is most often memory that ran out)"
    return last_line(done.stderr) or f"its process ended with status {done.returncode} and said nothing"


def lines(results: Sequence[FamilyResult]) -> list[str]:
    """The results as a table for people, with what has to be known of them below it."""
    heads = ("family", "through", "precision", "parameters", "norms", "MB/token", "prompt tok/s", "generation tok/s")
    rows = [_cells(r) for r in results if not r.left_out]
    left_out = [f"{r.name} ({r.peer}): left out: {r.left_out}" for r in results if r.left_out]
    notes = dict.fromkeys(f"{r.name}: {r.note}" for r in results if r.note and not r.left_out)
    return [*(aligned([heads, *rows], left=(0, 1, 2)) if rows else []), *left_out, *notes]


def _cells(result: FamilyResult) -> tuple[str, ...]:
    prompt, generation = result.prompt, result.generation
    assert prompt and generation and result.parameters and result.weight_bytes
    return (
        result.name,
        result.peer,
        result.precision,
        f"{result.parameters / 1e9:.3f}B",
        str(result.norm_layers),
        f"{result.weight_bytes / 1e6:,.1f}",
        number(prompt.median),
        f"{number(generation.median)} ({number(generation.least)}-{number(generation.most)})",
    )
