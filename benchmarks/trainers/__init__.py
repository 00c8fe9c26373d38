"""The programs that fine-tuning speed is compared between, one file each; imported when they are asked for.

Each file has ``load(job)``, for the worker process that trains with it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from openelm_mlx.benchmarks.peers.base import OURS, Absent
from openelm_mlx.benchmarks.trainers.base import Training, Tuner
from openelm_mlx.errors import OpenELMError

MLX_LM = "mlx-lm"

COMPARED = {
    MLX_LM: "its tuner as installed",
    "mlx-lm-blas": "in float32 with the BLAS that this program uses (Linux on a CPU)",
    "mlx-lm-sorted": "the same, and --ragged data sorted by length, which its own command does not do",
}
"""What fine-tuning can be compared with, and what it is."""

_FILES = {OURS: "ours", MLX_LM: "mlxlm"}


def trainer(peer: str) -> Any:
    """The module of a program."""
    return import_module(f"{__name__}.{_FILES[peer]}")


def tuners(names: Iterable[str], training: Training, backend: str) -> tuple[list[Tuner], list[str]]:
    """Who takes part, this project first, and a line for everyone who cannot.

    Args:
        names: some of `COMPARED`.
        training: what is to be done.
        backend: ``metal``, ``cuda`` or ``cpu``.

    Raises:
        OpenELMError: a name says nothing about such a training.
    """
    found: list[Tuner | Absent] = [Tuner(peer=OURS)]
    for name in names:
        found.append(_tuner(name, training, backend))
    return [t for t in found if isinstance(t, Tuner)], [str(t) for t in found if isinstance(t, Absent)]


def _tuner(name: str, training: Training, backend: str) -> Tuner | Absent:
    by_length = name == "mlx-lm-sorted"
    if by_length and training.ragged is None:
        raise OpenELMError("--compare mlx-lm-sorted goes with --ragged: full batches need no sorting")
    if find_spec("mlx_lm") is None:
        return Absent(MLX_LM, "it is not installed (pip install mlx-lm)")
    if name == MLX_LM:
        return Tuner(peer=MLX_LM)
    if backend == "cpu" and sys.platform == "linux":
        how = ["float32", "same BLAS"] + ["sorted"] * by_length
        return Tuner(peer=MLX_LM, variant=", ".join(how), dtype="float32", same_blas=True, by_length=by_length)
    if by_length:
        return Tuner(peer=MLX_LM, variant="sorted", by_length=True)
    return Absent(name, "there is no BLAS to choose here; compare with mlx-lm")
