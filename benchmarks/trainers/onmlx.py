"""What the trainers on MLX have in common. Imported after a BLAS was chosen, since it imports MLX."""

from __future__ import annotations

import math
import resource
from importlib import metadata
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from openelm_mlx.benchmarks.peers.base import process_peak_gb
from openelm_mlx.benchmarks.trainers.base import About, Step
from openelm_mlx.dtypes import dtype_name
from openelm_mlx.errors import OpenELMError
from openelm_mlx.trees import trainable

REMEDY = "train in bfloat16 or float32"
"""What to do about a loss that is not finite."""


def about(model: Any, backend: str, blas: str, versions: dict[str, str]) -> About:
    """What there is to say of an OpenELM, this project's or mlx-lm's, that is ready to be trained."""
    return About(
        trained=sum(array.size for array in trainable(model).values()),
        parameters=parameters(model),
        dtype=dtype_name(model.transformer.norm.weight.dtype),
        blas=blas if backend == "cpu" else f"MLX's {backend} kernels",
        versions={"mlx": metadata.version("mlx"), **versions},
    )


def made(loss: float, targets: int, shape: tuple[int, ...], seconds: float) -> Step:
    """A step that is over.

    Raises:
        OpenELMError: its loss is not finite, so that it was no training.
    """
    if not math.isfinite(loss):
        raise OpenELMError(f"the loss is {loss}; {REMEDY}")
    memory = mx.get_peak_memory() / 1e9
    return Step(loss, targets, shape[0], shape[1], seconds, memory, process_peak_gb(resource.RUSAGE_SELF))


def parameters(model: nn.Module) -> int:
    """Weights of a model, packed ones counted as what they stand for."""
    count = 0
    for module in model.modules():
        for name, array in module.items():
            if not isinstance(array, mx.array) or name.startswith("_"):
                continue
            if not hasattr(module, "bits"):
                count += array.size
            elif name == "weight":
                count += array.size * 32 // module.bits
    return count
