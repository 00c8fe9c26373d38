"""llama.cpp, through its own benchmark program llama-bench and a GGUF file of the model."""

from __future__ import annotations

import json
import os
import resource
import subprocess
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from openelm_mlx.benchmarks.peers.base import (
    Absent,
    Contender,
    Description,
    Job,
    LeftOut,
    Paths,
    Run,
    last_line,
    process_peak_gb,
)
from openelm_mlx.benchmarks.protocol import Timing
from openelm_mlx.config import OpenELMConfig

if TYPE_CHECKING:
    from openelm_mlx.benchmarks.models import Subject

NAME = "llama.cpp"

_KV_BYTES = {"f32": 4, "f16": 2, "bf16": 2}
"""Bytes an element of the cache takes, by the names of `type_k` and `type_v`."""


def contenders(subject: Subject, backend: str, paths: Paths) -> list[Contender | Absent]:
    """Stock: threads, batch sizes and device are llama-bench's defaults, and the precision is the file's."""
    if paths.llama_bench is None:
        return [Absent(NAME, "no path of its llama-bench given")]
    if paths.gguf is None:
        return [Absent(NAME, "no GGUF file of the model given")]
    if not os.access(paths.llama_bench, os.X_OK) or not paths.llama_bench.is_file():
        return [Absent(NAME, f"{paths.llama_bench}: no program that can be run")]
    if not paths.gguf.is_file():
        return [Absent(NAME, f"{paths.gguf}: no such file")]
    return [Contender(peer=NAME, path=str(paths.llama_bench.resolve()), gguf=str(paths.gguf.resolve()))]


class LlamaCpp:
    """One llama-bench process for each run.

    It loads and warms up each time, outside of what it measures. It feeds tokens of its own choice, times no sampling,
    and generates from an empty cache; and it cannot be told to stop after some time, nor what to generate.
    """

    def __init__(self, job: Job) -> None:
        self.config = OpenELMConfig.from_dict(job.config)
        self.contender = job.contender
        self.row: dict[str, Any] = {}

    def run(self, ids: Sequence[int], gen_tokens: int, time_limit: float | None) -> Run:
        """One prompt, and as many decode steps as follow the first token."""
        steps = gen_tokens - 1
        rows = self._bench("-p", str(len(ids)), "-n", str(steps), "-r", "1", "-o", "json")
        self.row = _row(rows, 0, steps)
        self._check_size()
        prompt_s, gen_s = (_seconds(row) for row in (_row(rows, len(ids), 0), self.row))
        return Run(Timing(len(ids), prompt_s, gen_tokens, gen_s), [], process_peak_gb(resource.RUSAGE_CHILDREN))

    def describe(self) -> Description:
        """From what the last run's output said."""
        row = self.row
        kv = [_KV_BYTES.get(row[key]) for key in ("type_k", "type_v")]
        heads = sum(self.config.num_kv_heads) * self.config.head_dim
        return Description(
            dtype=row["model_type"],
            weight_bytes=row["model_size"],
            kv_bytes_per_token=None if None in kv else heads * sum(size or 0 for size in kv),
            vocab_size=self.config.vocab_size,
            blas=f"llama.cpp's {row['backends']} backend, {row['n_threads']} threads",
            versions={NAME: f"{row['build_number']} ({row['build_commit']})"},
        )

    def _bench(self, *arguments: str) -> list[dict[str, Any]]:
        command = [str(self.contender.path), "-m", str(self.contender.gguf), *arguments]
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
        except OSError as e:
            raise LeftOut(f"{self.contender.path}: cannot be run: {e.strerror or e}") from None
        if done.returncode:
            said = last_line(done.stderr) or "nothing on stderr"
            raise LeftOut(f"llama-bench ended with status {done.returncode}: {said}")
        try:
            rows = json.loads(done.stdout)
        except ValueError:
            raise LeftOut("llama-bench printed no JSON for -o json; a newer one does") from None
        return rows if isinstance(rows, list) else []

    def _check_size(self) -> None:
        """A file of another model would give figures of another model."""
        there, wanted = self.row.get("model_n_params"), self.config.parameters
        if there != wanted:
            raise LeftOut(f"{self.contender.gguf}: the model has {wanted:,} parameters, and this file {there:,}")


def _row(rows: list[dict[str, Any]], prompt: int, steps: int) -> dict[str, Any]:
    """The test with these lengths (llama-bench measures the two apart)."""
    for row in rows:
        if row.get("n_prompt") == prompt and row.get("n_gen") == steps:
            return row
    raise LeftOut(f"llama-bench's output has no test of {prompt} prompt and {steps} generated tokens")


def _seconds(row: dict[str, Any]) -> float:
    return float(row["avg_ns"]) / 1e9


load = LlamaCpp
