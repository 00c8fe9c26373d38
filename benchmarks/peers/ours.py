"""This project, as ``openelm generate`` runs a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from openelm_mlx.benchmarks.peers.base import OURS, Absent, Contender, Description, Job, Paths, Run

if TYPE_CHECKING:
    from openelm_mlx.benchmarks.models import Subject
    from openelm_mlx.model import OpenELM

NAME = OURS


def contenders(subject: Subject, backend: str, paths: Paths) -> list[Contender | Absent]:
    """Always takes part."""
    return [Contender(peer=NAME)]


def pieces(model: OpenELM, ids: Sequence[int], gen_tokens: int) -> Iterator[list[int]]:
    """A generation as the clock takes it: greedy, and whatever is said about the end."""
    from openelm_mlx.generation import generate_tokens

    return ([token] for token in generate_tokens(model, ids, gen_tokens, eos_token_ids=()))


class Ours:
    """The model as :func:`openelm_mlx.load` makes it ready, and :func:`openelm_mlx.generate_tokens`."""

    def __init__(self, job: Job) -> None:
        from openelm_mlx.benchmarks.models import Subject, load_subject

        self.job = job
        self.model = load_subject(Subject.from_json(job.subject))

    def describe(self) -> Description:
        """The dtype is that of the logits, whatever the layers hold."""
        import mlx.core as mx

        from openelm_mlx import __version__, device
        from openelm_mlx.benchmarks.peers.onmlx import description

        dtype = self.model(mx.array([[0]])).dtype
        return description(self.model, dtype, self.job, device.blas(), {NAME: __version__})

    def run(self, ids: Sequence[int], gen_tokens: int, time_limit: float | None) -> Run:
        """One generation."""
        from openelm_mlx.benchmarks.peers.onmlx import measure

        return measure(pieces(self.model, ids, gen_tokens), len(ids), gen_tokens, time_limit)


load = Ours
