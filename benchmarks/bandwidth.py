"""How fast this machine reads memory: the limit of decoding, which reads every weight for every token."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from openelm_mlx import device

NBYTES = 1 << 29
"""Bytes read at a time; far more than any cache holds."""

_WIDTH = 4096
_TRIES = 50
_SECONDS = 0.8
"""Time for the tries of one kind; long enough to catch a moment in which nobody else reads."""
_VECTORS = 8
"""Products a try on a GPU, so that launching one weighs little."""


@dataclass(frozen=True)
class Bandwidth:
    """A measured read bandwidth."""

    bytes_per_s: float
    how: str
    """What was run."""


def read_bandwidth(nbytes: int | None = None) -> Bandwidth:
    """Measure the read bandwidth; a few seconds at most.

    On a CPU the best of NumPy's matrix-vector products (either way round) and dot product in float32, which use all
    cores; elsewhere of MLX's bfloat16 matrix-vector products. Each reads `nbytes` (default 512 MB, less where memory is
    short) several times, and the fastest counts: that is what the machine can do.
    """
    if nbytes is None:
        memory = device.memory()
        nbytes = NBYTES if memory is None else min(NBYTES, memory.available // 4)
    return _with_numpy(nbytes) if device.backend() == "cpu" else _with_mlx(nbytes)


def _with_numpy(nbytes: int) -> Bandwidth:
    import numpy as np

    rows = max(2, nbytes // (4 * _WIDTH)) // 2 * 2
    matrix = np.ones((rows, _WIDTH), np.float32)  # written, not np.zeros: untouched pages are all one and the same
    left, right = np.ones(rows, np.float32), np.ones(_WIDTH, np.float32)
    first, second = matrix[: rows // 2].ravel(), matrix[rows // 2 :].ravel()
    kinds = {
        "vector-matrix product": lambda: left @ matrix,
        "matrix-vector product": lambda: matrix @ right,
        "dot product": lambda: first @ second,
    }
    kind, seconds = _fastest(kinds)
    return Bandwidth(matrix.nbytes / seconds, f"NumPy, float32 {kind} over {matrix.nbytes / 1e6:,.0f} MB")


def _with_mlx(nbytes: int) -> Bandwidth:
    import mlx.core as mx

    rows = max(1, nbytes // (2 * _WIDTH))
    matrix = mx.ones((rows, _WIDTH), mx.bfloat16)
    lefts = [mx.full((1, rows), i, mx.bfloat16) for i in range(_VECTORS)]
    rights = [mx.full((_WIDTH, 1), i, mx.bfloat16) for i in range(_VECTORS)]
    mx.eval(matrix, lefts, rights)

    def run(products: Callable[[], list[mx.array]]) -> Callable[[], None]:
        def once() -> None:
            mx.eval(products())
            mx.synchronize()

        return once

    kinds = {
        "vector-matrix product": run(lambda: [v @ matrix for v in lefts]),
        "matrix-vector product": run(lambda: [matrix @ v for v in rights]),
    }
    kind, seconds = _fastest(kinds)
    how = f"MLX, bfloat16 {kind} over {matrix.nbytes / 1e6:,.0f} MB"
    return Bandwidth(_VECTORS * matrix.nbytes / seconds, how)


def _fastest(kinds: Mapping[str, Callable[[], object]]) -> tuple[str, float]:
    """The kind of run that was once the fastest, and its seconds."""
    best = {}
    for kind, run in kinds.items():
        run()  # wakes threads, compiles kernels
        best[kind] = min(_times(run))
    kind = min(best, key=lambda k: best[k])
    return kind, best[kind]


def _times(run: Callable[[], object]) -> list[float]:
    times: list[float] = []
    while len(times) < _TRIES and sum(times) < _SECONDS:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return times
