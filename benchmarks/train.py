"""``openelm bench train``: fine-tuning speed, of all weights or of adapters, beside mlx-lm's own tuner if asked.

Every trainer runs in a process of its own. They take turns step by step, so that a machine that becomes slower or
faster with time does so for all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from openelm_mlx import device, machine
from openelm_mlx.benchmarks import busy, trainers
from openelm_mlx.benchmarks.models import Subject
from openelm_mlx.benchmarks.peers.base import Absent, LeftOut
from openelm_mlx.benchmarks.protocol import Spread
from openelm_mlx.benchmarks.results import Result
from openelm_mlx.benchmarks.runner import ANSWER_TIMEOUT, PAUSE, Worker
from openelm_mlx.benchmarks.table import aligned, number
from openelm_mlx.benchmarks.trainers.base import About, Step, Training, Tuner, TuningJob
from openelm_mlx.errors import OpenELMError

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Trained:
    """How fast one program trained."""

    tuner: Tuner
    about: About
    first: Step
    """The warm-up."""
    steps: tuple[Step, ...]
    """Those that count."""

    @property
    def tokens_per_s(self) -> float:
        """Targets over the time of the steps, all of them together."""
        return sum(s.targets for s in self.steps) / sum(s.seconds for s in self.steps)

    @property
    def by_step(self) -> Spread:
        """Targets a second, step by step."""
        return Spread.of([s.targets / s.seconds for s in self.steps])

    @property
    def useful(self) -> float:
        """Part of the rows' positions that are targets."""
        return sum(s.targets for s in self.steps) / sum(s.rows * s.length for s in self.steps)

    @property
    def new_shapes(self) -> int:
        """Steps whose rows had a number and length that the program had not met: a compiled step is traced anew."""
        shapes = [(s.rows, s.length) for s in (self.first, *self.steps)]
        return len(set(shapes)) - 1

    @property
    def peak_memory_gb(self) -> float:
        """Most memory MLX held, weights included; units of 1e9 bytes."""
        return self.steps[-1].peak_memory_gb

    @property
    def process_gb(self) -> float:
        """Most memory the process held, from its start."""
        return self.steps[-1].process_gb

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "program": self.tuner.name,
            "peer": self.tuner.peer,
            "variant": self.tuner.variant,
            **asdict(self.about),
            "tokens_per_s": self.tokens_per_s,
            "by_step": asdict(self.by_step),
            "useful": self.useful,
            "new_shapes": self.new_shapes,
            "first_loss": self.first.loss,
            "last_loss": self.steps[-1].loss,
            "peak_memory_gb": self.peak_memory_gb,
            "process_gb": self.process_gb,
            "first": asdict(self.first),
            "steps": [asdict(step) for step in self.steps],
        }


@dataclass(frozen=True)
class Report:
    """How fast a model trained, with one program or several."""

    subject: Subject
    backend: str
    training: Training
    programs: tuple[Trained, ...]
    """Ours is the first."""
    notes: tuple[str, ...]

    def result(self, command: Sequence[str]) -> Result:
        """As it is kept; `command` is what was typed."""
        ours, *others = self.programs
        facts = {
            "model": self.subject.name,
            "precision": self.subject.precision,
            "programs": [program.to_json() for program in self.programs],
            "ratios": [_ratio(ours, other, self.training) for other in others],
        }
        kind = self.training.method + ("" if self.training.ragged is None else "-ragged")
        return Result(
            name=f"train-{Path(self.subject.name).name}-{kind}",
            command=tuple(command),
            machine=machine.machine(),
            protocol=asdict(self.training),
            notes=self.notes,
            extra={"training": facts},
        )


def measure(
    subject: Subject,
    training: Training,
    compare: Sequence[str] = (),
    *,
    progress: Progress = lambda line: None,
    timeout: float = ANSWER_TIMEOUT,
) -> Report:
    """Train a model with random data and time the steps.

    Args:
        subject: the model.
        training: what is done.
        compare: names of :data:`openelm_mlx.benchmarks.trainers.COMPARED`.
        progress: told what is being done, line by line.
        timeout: most seconds to wait for a step.

    Raises:
        OpenELMError: a name is not known, or the model cannot be trained here. What others cannot do is a note.
    """
    backend = device.backend()
    tuners, absent = trainers.tuners(compare, training, backend)
    before = busy.usage()
    config = subject.config().to_dict()
    turns = [_Turns(TuningJob(t, subject.to_json(), config, backend, training), progress, timeout) for t in tuners]
    notes = list(absent)
    for line in absent:
        progress(line)
    try:
        for n in range(training.steps + 1):
            for one in list(turns):
                try:
                    one.take(n)
                except LeftOut as e:
                    if one is turns[0]:
                        raise OpenELMError(f"{subject.name}: {e}") from None
                    one.close()
                    turns.remove(one)
                    notes.append(str(Absent(one.name, str(e))))
                    progress(notes[-1])
    finally:
        for one in turns:
            one.close()
    if backend == "cpu":
        notes.append("on a CPU openelm-mlx trains in float32, whatever precision is stored")
    notes += [line for line in (busy.busy_since(before),) if line]
    return Report(subject, backend, training, tuple(one.outcome() for one in turns), tuple(notes))


class _Turns:
    """One program's part."""

    def __init__(self, job: TuningJob, progress: Progress, timeout: float) -> None:
        self.job, self.progress, self.timeout = job, progress, timeout
        self.name = job.tuner.name
        self.worker: Worker | None = None
        self.about: About | None = None
        self.steps: list[Step] = []

    def take(self, n: int) -> None:
        """The next step; the first loads the model."""
        if self.worker is None:
            self.progress(f"{self.name}: loading {self.job.subject['name']}")
            self.worker = Worker(self.job.contender, self.timeout, "train_worker")
            self.about = About(**self.worker.ask("load", job=self.job.to_json()))
        time.sleep(PAUSE)
        step = Step(**self.worker.ask("step"))
        self.steps.append(step)
        what = f"step {n} of {self.job.training.steps}" if n else "a step that does not count"
        speed = f"{number(step.targets / step.seconds)} tokens/s"
        self.progress(f"{self.name}: {what}: {step.rows} x {step.length}, {speed}, loss {step.loss:.3f}")

    def close(self) -> None:
        """End the process."""
        if self.worker is not None:
            self.worker.close()
            self.worker = None

    def outcome(self) -> Trained:
        """After all turns."""
        assert self.about is not None
        return Trained(self.job.tuner, self.about, self.steps[0], tuple(self.steps[1:]))


def _ratio(ours: Trained, other: Trained, training: Training) -> dict[str, Any]:
    """How many times as fast ours is, and how much memory it takes of the other's, as plain values."""
    ratio: dict[str, Any] = {
        "program": ours.tuner.name,
        "to": other.tuner.name,
        "tokens_per_s": ours.tokens_per_s / other.tokens_per_s,
        "peak_memory": ours.peak_memory_gb / other.peak_memory_gb,
        "process_memory": ours.process_gb / other.process_gb,
    }
    if training.ragged is None:  # otherwise steps are not alike
        ratio["by_step"] = asdict(ours.by_step / other.by_step)
    return ratio


_HEADINGS = (
    "program", "tokens/s", "step by step", "targets", "rows filled", "new shapes", "MLX GB", "process GB", "loss",
)  # fmt: skip


def lines(report: Report) -> list[str]:
    """A summary for people."""
    r, t = report, report.training
    ours, *others = r.programs
    what = "all weights" if t.method == "full" else f"{'LoRA' if t.method == 'lora' else 'DoRA'} of rank {t.rank}"
    rows = f"{t.batch_size} x {t.seq_length} tokens"
    if t.ragged is not None:
        rows = f"{t.batch_size} rows, sequences of {t.ragged[0]} to {t.ragged[1]} tokens (ours packed into {rows})"
    return [
        f"{r.subject.name} ({r.subject.precision}), {what}, on {r.backend}: {t.steps} steps of {rows}",
        f"trained {ours.about.trained:,} of {ours.about.parameters:,} parameters",
        "",
        *aligned([_HEADINGS, *(_cells(program, t) for program in r.programs)], left=(0,)),
        "",
        "tokens/s are targets (tokens of the data to be predicted, no padding) over the time of all steps but the",
        "first, update included",
        *(f"{p.tuner.name}: {p.about.dtype}, {p.about.blas}" for p in r.programs),
        *(_ratio_line(ours, other, t) for other in others),
        *(f"note: {note}" for note in r.notes),
    ]


def _cells(p: Trained, training: Training) -> tuple[str, ...]:
    spread = p.by_step
    return (
        p.tuner.name,
        number(p.tokens_per_s),
        f"{number(spread.median)} ({number(spread.least)}-{number(spread.most)})",
        f"{sum(s.targets for s in p.steps):,}",
        f"{p.useful:.0%}",
        "" if training.ragged is None else str(p.new_shapes),
        f"{p.peak_memory_gb:.2f}",
        f"{p.process_gb:.2f}",
        f"{p.first.loss:.3f} -> {p.steps[-1].loss:.3f}",
    )


def _ratio_line(ours: Trained, other: Trained, training: Training) -> str:
    ratio = _ratio(ours, other, training)
    steps = ""
    if "by_step" in ratio:
        s = ratio["by_step"]
        steps = f" (step by step {s['median']:.2f}, {s['least']:.2f} to {s['most']:.2f})"
    return (
        f"{ours.tuner.name} is {ratio['tokens_per_s']:.2f} times as fast as {other.tuner.name}{steps}, with "
        f"{ratio['peak_memory']:.2f} times the memory ({ratio['process_memory']:.2f} of the process)"
    )
