"""Several peers measured in one run, in turns: the first repeat of each, then the second of each, and so on.

Each runs in a process of its own (`worker.py`), which sleeps while the others take their turns. So a machine that
becomes slower or faster with time does so for all of them, and none brings another its libraries.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openelm_mlx import device, own_python
from openelm_mlx.benchmarks import peers
from openelm_mlx.benchmarks.models import Subject
from openelm_mlx.benchmarks.peers.base import (
    OURS,
    Absent,
    Contender,
    Description,
    Job,
    LeftOut,
    Paths,
    Run,
    last_line,
)
from openelm_mlx.benchmarks.protocol import Protocol, Spread, Timing, prompt_ids
from openelm_mlx.checkpoint import open_weights
from openelm_mlx.config import OpenELMConfig
from openelm_mlx.cpu import halves
from openelm_mlx.loading import kv_bytes_per_token

ANSWER_TIMEOUT = 4 * 3600.0
"""Seconds a peer may take to load or for one run: half a token a second is slow, but no fault."""

WARM_UP_TOKENS = 8
"""Tokens generated after the whole prompt before a peer is measured."""

PAUSE = 0.1
"""Seconds between two turns, in which the threads of the one before stop spinning."""

_STORED_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp32": 4.0, "4bit": 0.5625, "8bit": 1.0625}
"""Bytes a weight takes in a preset's precision; packed ones with a scale and a bias for each 64."""

_PROCESS_BYTES = 300e6
"""What a worker takes beside its model."""

_LOADING = 1.2
"""Part of a model's size that its loading takes."""


@dataclass(frozen=True)
class Outcome:
    """What a peer did."""

    contender: Contender
    subject: Subject
    description: Description
    timings: list[Timing]
    """One for each repeat."""
    tokens: list[int]
    """Generated in the last run; empty when the peer does not tell."""
    peak_memory_gb: float
    """The most of all repeats, in units of 1e9 bytes; see :class:`Run`."""


@dataclass
class Result:
    """What a comparison gave."""

    outcomes: list[Outcome] = field(default_factory=list)
    """In the order of the contenders, without those that were left out."""
    notes: list[str] = field(default_factory=list)
    """A line for everyone left out, and for whatever was done otherwise than usual."""


def compare(
    subjects: Iterable[Subject],
    names: Sequence[str],
    protocol: Protocol,
    *,
    paths: Paths | None = None,
    progress: Callable[[str], None] = lambda line: None,
    timeout: float = ANSWER_TIMEOUT,
) -> Result:
    """Measure models one after the other, each with every peer that can; the dry run is the first model's alone.

    Args:
        subjects: the models.
        names: of the peers, in the order of their turns; see :data:`openelm_mlx.benchmarks.peers.PEERS`.
        protocol: what a run is, and how many.
        paths: where the peers are that no Python package brings.
        progress: told what is being done, line by line.
        timeout: most seconds to wait for a peer to load, or for one run of it.

    Raises:
        OpenELMError: a name or a model is wrong. What a peer cannot do is a note instead.
    """
    result = Result()
    for subject in subjects:
        found, absent = peers.contenders(names, subject, device.backend(), paths)
        for line in absent:
            if line not in result.notes:
                progress(line)
        done = run(found, subject, protocol, progress=progress, timeout=timeout)
        result.outcomes += done.outcomes
        result.notes += [note for note in absent + done.notes if note not in result.notes]
        if done.outcomes:
            protocol = dataclasses.replace(protocol, dry_run=False)
    return result


def run(
    contenders: Sequence[Contender],
    subject: Subject,
    protocol: Protocol,
    *,
    progress: Callable[[str], None] = lambda line: None,
    timeout: float = ANSWER_TIMEOUT,
) -> Result:
    """Measure one model with several peers in turns; see :func:`compare`."""
    result, config, backend = Result(), subject.config(), device.backend()
    ids = prompt_ids(protocol.prompt_tokens, config.vocab_size)
    jobs = [Job(c, subject.to_json(), config.to_dict(), backend) for c in contenders]
    turns = [_Turns(job, ids, protocol, progress, timeout) for job in jobs]
    together = len(turns) == 1 or _fit_together(contenders, subject, config, backend)
    if not together:
        result.notes.append(
            f"{subject.name}: the peers do not fit into memory together, so each is loaded anew for every repeat"
        )
        progress(result.notes[-1])
    dry_run = protocol.dry_run
    try:
        for repeat in range(-1 if together else 0, protocol.repeats):
            for one in list(turns):
                try:
                    one.prepare(dry_run=dry_run)
                    dry_run = False
                    if repeat >= 0:
                        one.take(repeat)
                    if not together:
                        one.close()
                except LeftOut as e:
                    one.close()
                    turns.remove(one)
                    result.notes.append(str(Absent(one.name, f"{subject.name}: {e}")))
                    progress(result.notes[-1])
    finally:
        for one in turns:
            one.close()
    result.outcomes += [one.outcome(subject) for one in turns]
    return result


class _Turns:
    """One peer's part in a comparison."""

    def __init__(
        self, job: Job, ids: list[int], protocol: Protocol, progress: Callable[[str], None], timeout: float
    ) -> None:
        self.job, self.ids, self.protocol, self.progress, self.timeout = job, ids, protocol, progress, timeout
        self.name = job.contender.name
        self.worker: Worker | None = None
        self.description: Description | None = None
        self.runs: list[Run] = []

    def prepare(self, *, dry_run: bool) -> None:
        """Load and warm up, unless that was done."""
        if self.worker is not None:
            return
        self.progress(f"{self.name}: loading {self.job.subject['name']}")
        self.worker = Worker(self.job.contender, self.timeout)
        self.worker.ask("load", job=self.job.to_json())
        if dry_run:
            self.progress(f"{self.name}: a whole run that does not count")
            self._run(self.protocol.gen_tokens)
        self._run(min(WARM_UP_TOKENS, self.protocol.gen_tokens))
        self.description = Description(**self.worker.ask("describe"))

    def take(self, repeat: int) -> None:
        """One run that counts."""
        time.sleep(PAUSE)
        done = self._run(self.protocol.gen_tokens)
        self.runs.append(done)
        speeds = f"prompt {done.timing.prompt_tps:,.1f}, generation {done.timing.generation_tps:,.1f} tokens/s"
        self.progress(f"{self.name}: run {repeat + 1} of {self.protocol.repeats}: {speeds}")

    def _run(self, gen_tokens: int) -> Run:
        assert self.worker is not None
        limit = self.protocol.time_limit
        values = self.worker.ask("run", ids=self.ids, gen_tokens=gen_tokens, time_limit=limit)
        return Run(**{**values, "timing": Timing(**values["timing"])})

    def close(self) -> None:
        """End the process."""
        if self.worker is not None:
            self.worker.close()
            self.worker = None

    def outcome(self, subject: Subject) -> Outcome:
        """After all turns."""
        assert self.description is not None
        peak = max(run.peak_memory_gb for run in self.runs)
        timings = [run.timing for run in self.runs]
        return Outcome(self.job.contender, subject, self.description, timings, self.runs[-1].tokens, peak)


class Worker:
    """A worker process, as the process that asks sees it; `module` is what it runs."""

    def __init__(self, contender: Contender, timeout: float, module: str = "worker") -> None:
        self.timeout = timeout
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed in close()
        self._rest = b""
        own = {} if contender.preloads else {device.BLAS_VARIABLE: "none"}
        try:
            self._process = subprocess.Popen(
                [contender.python or sys.executable, *own_python.arguments(f"openelm_mlx.benchmarks.{module}")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env={**os.environ, **own},
                start_new_session=True,  # Ctrl-C is not for it, and what it starts can be ended with it
            )
        except OSError as e:
            self._errors.close()
            raise LeftOut(f"{contender.python}: cannot be run: {e.strerror or e}") from None

    def ask(self, command: str, **values: Any) -> Any:
        """The value a command gives; raises :class:`LeftOut` if there is none."""
        assert self._process.stdin
        try:
            self._process.stdin.write(json.dumps({"command": command, **values}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise LeftOut(self._end()) from None
        answer = json.loads(self._line())
        if "refused" in answer:
            raise LeftOut(answer["refused"])
        return answer["value"]

    def close(self) -> None:
        """End the process, whatever it does, and all that it started."""
        with suppress(ProcessLookupError, PermissionError):  # it and its group are gone (macOS says the latter)
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            assert stream
            with suppress(BrokenPipeError):  # what it did not read
                stream.close()

    def _line(self) -> bytes:
        assert self._process.stdout
        out, deadline = self._process.stdout.fileno(), time.monotonic() + self.timeout
        while b"\n" not in self._rest:
            ready, _, _ = select.select([out], [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                raise LeftOut(f"no answer within {self.timeout:g} seconds")
            piece = os.read(out, 1 << 16)
            if not piece:
                raise LeftOut(self._end())
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _end(self) -> str:
        """Why the process ended, in words."""
        status = self._process.wait()
        self._errors.seek(0)
        said = last_line(self._errors.read().decode(errors="replace"))
        how = f"status {status}" if status >= 0 else f"signal {-status}"
        return f"its process ended with {how}" + (f": {said}" if said else "")


def memory_needed(contender: Contender, subject: Subject, config: OpenELMConfig, backend: str) -> float:
    """About the bytes that a worker takes, with a full cache."""
    if contender.gguf is not None:
        return Path(contender.gguf).stat().st_size + _PROCESS_BYTES
    dtype = contender.dtype
    if contender.peer == OURS and backend == "cpu" and not (subject.precision == "bf16" and halves.possible()):
        dtype = "float32"
    item = 4 if dtype == "float32" else 2
    if dtype is not None:
        weights = float(config.parameters * item)
    elif subject.folder is not None:
        weights = sum(tensor.nbytes for tensor in open_weights(subject.folder).values())
    else:
        weights = config.parameters * _STORED_BYTES[subject.precision]
    cache = kv_bytes_per_token(config, item) * config.max_context_length
    return weights * _LOADING + cache + _PROCESS_BYTES


def _fit_together(contenders: Sequence[Contender], subject: Subject, config: OpenELMConfig, backend: str) -> bool:
    memory = device.memory()
    needed = sum(memory_needed(contender, subject, config, backend) for contender in contenders)
    return memory is None or needed < memory.available


def agreement(outcomes: Sequence[Outcome]) -> list[str]:
    """A line for each peer that says whether it generated what the first one did; none where weights are random."""
    told = [o for o in outcomes if o.tokens and o.subject.folder is not None]
    lines = []
    for name in dict.fromkeys(o.subject.name for o in told):
        first, *others = [o for o in told if o.subject.name == name]
        for other in others:
            pairs = list(zip(first.tokens, other.tokens, strict=False))
            same = next((n for n, (a, b) in enumerate(pairs) if a != b), len(pairs))
            how = f"all {same}" if same == len(pairs) else f"the first {same} of {len(pairs)}"
            lines.append(f"{name}: {other.contender.name} generates {how} tokens as {first.contender.name} does")
    return lines


def lines(result: Result) -> list[str]:
    """A comparison, for people: medians and spreads, then agreement and notes."""
    rows = []
    for outcome in result.outcomes:
        speeds = [f"{outcome.subject.name}  {outcome.contender.name:32}"]
        for word, name in (("prompt", "prompt_tps"), ("generation", "generation_tps"), ("total", "total_tps")):
            spread = Spread.of([getattr(timing, name) for timing in outcome.timings])
            speeds.append(f"{word} {spread.median:,.2f} ({spread.least:,.2f} to {spread.most:,.2f})")
        rows.append("  ".join(speeds) + " tokens/s")
    return rows + agreement(result.outcomes) + result.notes
