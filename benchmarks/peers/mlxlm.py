"""mlx-lm: as it loads and runs a model by itself, and at its best on a CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from openelm_mlx.benchmarks.peers.base import (
    WITH_OPENBLAS,
    Absent,
    Contender,
    Description,
    Job,
    Paths,
    Run,
    load_openblas,
)

if TYPE_CHECKING:
    from openelm_mlx.benchmarks.models import Subject

NAME = "mlx-lm"


def contenders(subject: Subject, backend: str, paths: Paths) -> list[Contender | Absent]:
    """Stock; on Linux's CPU backend also in float32 with OpenBLAS."""
    if find_spec("mlx_lm") is None:
        return [Absent(NAME, "it is not installed (pip install mlx-lm)")]
    return [Contender(peer=NAME), *with_openblas(NAME, backend)]


def with_openblas(name: str, backend: str, path: str | None = None) -> list[Contender]:
    """A peer on MLX at its best on a CPU, where its stock setting is not that: a Mac's has a fast BLAS."""
    if backend != "cpu" or sys.platform != "linux":
        return []
    return [Contender(peer=name, variant=WITH_OPENBLAS, dtype="float32", openblas=True, path=path)]


def model_of(job: Job) -> Any:
    """mlx-lm's own OpenELM, with the weights of the job's folder or random ones."""
    from mlx_lm.models.openelm import Model, ModelArgs
    from mlx_lm.utils import load_model

    from openelm_mlx.benchmarks.models import fill_randomly

    if job.folder is not None:
        return load_model(job.folder)[0]
    model = Model(ModelArgs.from_dict(job.config))
    fill_randomly(model, job.subject["precision"])
    model.eval()
    return model


class MlxLm:
    """mlx-lm's model, and its `generate_step` with all defaults, which is what its `stream_generate` goes through."""

    def __init__(self, job: Job) -> None:
        blas = load_openblas() if job.contender.openblas else None
        from openelm_mlx.benchmarks.peers.onmlx import STOCK_BLAS, to_float32

        self.job, self.blas = job, blas or STOCK_BLAS
        self.model = model_of(job)
        if job.contender.dtype == "float32":
            to_float32(self.model)

    def describe(self) -> Description:
        """The dtype is that of the logits."""
        import mlx.core as mx
        from mlx_lm import __version__

        from openelm_mlx.benchmarks.peers.onmlx import description

        return description(self.model, self.model(mx.array([[0]])).dtype, self.job, self.blas, {NAME: __version__})

    def run(self, ids: Sequence[int], gen_tokens: int, time_limit: float | None) -> Run:
        """One generation; the step that mlx-lm dispatches beyond the last token is its own business."""
        from mlx_lm.generate import generation_stream, wired_limit

        from openelm_mlx.benchmarks.peers.onmlx import measure

        streams: list[Any] = [generation_stream]  # of one class or another, by version
        with wired_limit(self.model, streams):  # as stream_generate does
            return measure(self._pieces(ids, gen_tokens), len(ids), gen_tokens, time_limit, generation_stream)

    def _pieces(self, ids: Sequence[int], gen_tokens: int) -> Iterator[list[int]]:
        import mlx.core as mx
        from mlx_lm.generate import generate_step

        for token, _ in generate_step(mx.array(list(ids)), self.model, max_tokens=gen_tokens):
            yield [int(token)]


load = MlxLm
