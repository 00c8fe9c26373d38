"""From what a person asks for to a stored result: models, precisions and lengths, measured one after another."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from openelm_mlx import assets, device, hub, machine
from openelm_mlx.benchmarks import busy, dispatches, runner
from openelm_mlx.benchmarks.bandwidth import Bandwidth, read_bandwidth
from openelm_mlx.benchmarks.models import Subject, stored_as
from openelm_mlx.benchmarks.peers.base import OURS, STOCK, Paths, packed_bits
from openelm_mlx.benchmarks.protocol import Protocol
from openelm_mlx.benchmarks.results import Result, Row, ratios
from openelm_mlx.checkpoint import PROVENANCE
from openelm_mlx.config import PRESETS
from openelm_mlx.errors import OpenELMError
from openelm_mlx.loading import read_model_config

IN_FLOAT32 = "on a CPU openelm-mlx computes in float32, whatever precision is stored; MB/token tells what is read"

_EMBEDDED = "embedded model"
"""What tables call it; its path is long."""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Task:
    """One model, run in one way."""

    subject: Subject
    protocol: Protocol


def subject_of(name: str, *, random_weights: bool, precision: str | None) -> Subject:
    """The model that a person named.

    Args:
        name: a folder, a Hub name, or with `random_weights` one of the released sizes.
        random_weights: whether the model is only a size.
        precision: of random weights; None for a folder.

    Raises:
        OpenELMError: the combination makes no sense, or the folder is no model.
    """
    if random_weights:
        if name not in PRESETS:
            raise OpenELMError(f"--random-weights needs one of the sizes {', '.join(PRESETS)}, not {name}")
        stored_as(str(precision))
        return Subject(name, preset=name, precision=str(precision))
    if name in PRESETS and not Path(name).exists():
        raise OpenELMError(f"{name} is a size, not a folder; add --random-weights to measure it without its weights")
    if precision is not None:
        raise OpenELMError(f"--precision goes with --random-weights: {name} has the precision it was converted to")
    folder = hub.resolve(name)
    name = _EMBEDDED if folder == assets.MODEL else name
    return Subject(name, folder=folder, precision=stored_precision(folder))


def stored_precision(folder: Path) -> str:
    """What tables call the precision of a model folder; ``stored`` when it does not say."""
    values = read_model_config(folder)
    bits = packed_bits(Subject(str(folder), folder=folder))
    if bits:
        return f"{bits}bit"
    provenance: dict[str, Any] = values.get(PROVENANCE, {})
    named = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    return str(provenance.get("precision") or named.get(str(values.get("torch_dtype")), "stored"))


def measure(
    tasks: Sequence[Task],
    *,
    name: str,
    command: Sequence[str],
    peers: Sequence[str] = (),
    paths: Paths | None = None,
    progress: Progress = lambda line: None,
) -> Iterator[Result]:
    """Measure every task with this project and its peers, alternating.

    Args:
        tasks: in their order; the first model makes the protocol's dry run.
        name: of the suite or model, for the result's file.
        command: what was typed.
        peers: names of :data:`openelm_mlx.benchmarks.peers.PEERS` beside our own.
        paths: where peers are that no Python package brings.
        progress: told what is being done.

    Yields:
        The result so far after every task, so that a long run that is interrupted has given what it measured.
    """
    tasks, notes = _in_their_windows(tasks)
    at_first = busy.busy()
    facts = machine.machine()
    notes += machine.power_notes(facts)
    for note in (*notes, at_first):
        if note:
            progress(note)
    progress("measuring the machine's read bandwidth")
    bandwidth = read_bandwidth()
    rows: list[Row] = []
    protocols: list[dict[str, Any]] = []
    for n, task in enumerate(tasks):
        progress(f"{task.subject.name} {task.subject.precision} ({n + 1} of {len(tasks)})")
        before = busy.usage()
        protocol = task.protocol if n == 0 else dataclasses.replace(task.protocol, dry_run=False)
        done = runner.compare([task.subject], (OURS, *peers), protocol, paths=paths, progress=progress)
        # The neighbours of a virtual machine come and go: what it reached in any moment is what it can do.
        bandwidth = max(bandwidth, read_bandwidth(), key=lambda b: b.bytes_per_s)
        rows += [_row(outcome, bandwidth) for outcome in done.outcomes]
        if device.backend() == "cpu":
            done.notes.append(IN_FLOAT32)
        found = [*done.notes, *runner.agreement(done.outcomes), busy.busy_since(before)]
        notes += [line for line in found if line and line not in notes]
        protocols.append(
            {"model": task.subject.name, "precision": task.subject.precision, **dataclasses.asdict(protocol)}
        )
        yield Result(
            name=name,
            command=tuple(command),
            machine=facts,
            protocol={"tasks": protocols},
            bandwidth=bandwidth,
            rows=tuple(rows),
            ratios=ratios(rows, OURS),
            notes=(*notes, *_still_missing(n + 1, len(tasks))),
        )


def _in_their_windows(tasks: Sequence[Task]) -> tuple[list[Task], list[str]]:
    """The tasks with runs that their models' windows hold, and a line for each that became shorter.

    Raises:
        OpenELMError: a prompt leaves no room; said before anything is measured.
    """
    fitting, notes = [], []
    for task in tasks:
        window = task.subject.config().max_context_length
        try:
            protocol = task.protocol.within(window)
        except OpenELMError as e:
            raise OpenELMError(f"{task.subject.name}: {e}") from None
        if protocol != task.protocol:
            notes.append(
                f"{task.subject.name}: {protocol.gen_tokens} tokens are generated instead of "
                f"{task.protocol.gen_tokens}, as its window has {window}"
            )
        fitting.append(dataclasses.replace(task, protocol=protocol))
    return fitting, notes


def _still_missing(done: int, of: int) -> tuple[str, ...]:
    return () if done == of else (f"interrupted: {done} of {of} tasks were measured",)


def _row(outcome: runner.Outcome, bandwidth: Bandwidth) -> Row:
    contender, subject, about = outcome.contender, outcome.subject, outcome.description
    return Row.of(
        outcome.timings,
        bandwidth=bandwidth,
        peer=contender.peer,
        variant=contender.variant,
        model=subject.name,
        precision=subject.precision,
        weight_bytes=about.weight_bytes,
        kv_bytes_per_token=about.kv_bytes_per_token,
        dispatches=_dispatches(contender.peer, subject) if contender.variant == STOCK else None,
        peak_memory_gb=outcome.peak_memory_gb,
    )


@cache
def _dispatches(peer: str, subject: Subject) -> int | None:
    """Primitives that a program dispatches a decode step on a GPU; None where that cannot be counted."""
    counters = {OURS: dispatches.count_ours, "mlx-lm": dispatches.count_mlx_lm}
    if peer not in counters:
        return None
    try:
        return counters[peer](subject.config(), "4bit" if packed_bits(subject) else "bf16").total
    except OpenELMError:  # no compiler for MLX's own use on this CPU: the figure is not worth a run
        return None
