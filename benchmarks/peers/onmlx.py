"""What the peers on MLX have in common. Imported after a BLAS was chosen, since it imports MLX."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from openelm_mlx.benchmarks.peers.base import Description, Job, Run
from openelm_mlx.benchmarks.peers.clock import timed
from openelm_mlx.benchmarks.roofline import weight_bytes_per_token
from openelm_mlx.config import OpenELMConfig
from openelm_mlx.dtypes import dtype_name
from openelm_mlx.loading import kv_bytes_per_token
from openelm_mlx.quantize import dequantized

STOCK_BLAS = "MLX's own"


def to_float32(model: nn.Module) -> None:
    """Unpack and cast everything, in place."""
    plain = [(path, dequantized(layer, mx.float32)) for path, layer in model.named_modules()]
    model.update_modules(tree_unflatten([(path, layer) for path, layer in plain if "weight" in layer]))
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())


def description(
    model: nn.Module, dtype: mx.Dtype, job: Job, blas: str, versions: Mapping[str, str] | None = None
) -> Description:
    """What there is to say of a model that computes in `dtype`."""
    config = OpenELMConfig.from_dict(job.config)
    return Description(
        dtype=dtype_name(dtype),
        weight_bytes=weight_bytes_per_token(model),
        kv_bytes_per_token=kv_bytes_per_token(config, dtype.size),
        vocab_size=config.vocab_size,
        blas=blas if job.backend == "cpu" else f"MLX's {job.backend} kernels",
        versions={"mlx": metadata.version("mlx"), **(versions or {})},
    )


def measure(
    pieces: Iterable[list[int]], prompt_tokens: int, gen_tokens: int, time_limit: float | None, stream: Any = None
) -> Run:
    """Time a generation on MLX, with nothing else under way on its stream, before or after."""
    mx.synchronize()
    mx.reset_peak_memory()
    timing, tokens = timed(pieces, prompt_tokens, gen_tokens, time_limit)
    if stream is not None:
        mx.synchronize(stream)
    mx.synchronize()
    return Run(timing, tokens, mx.get_peak_memory() / 1e9)
