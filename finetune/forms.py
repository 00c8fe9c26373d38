"""What the forms of adapters have in common: low-rank updates layer by layer, each with a strength of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from openelm_mlx.adapters import LINEARS, Adapter, AdapterConfig, AdapterError, architecture
from openelm_mlx.adapters.config import scale_of
from openelm_mlx.adapters.files import check_finite
from openelm_mlx.config import OpenELMConfig
from openelm_mlx.errors import OpenELMError
from openelm_mlx.layer_paths import EMBEDDING, HEAD

_ROUNDING = 2.0**-8
"""Relative difference of two values that were the same number before each was rounded to bfloat16."""
_TINY = 6e-8
"""Absolute difference below which float16 cannot tell numbers apart."""
_ANOTHER = 0.7
"""From this part of the weights' own size on, a difference is no quantization error: 4 bits come to 0.1, 2 bits to 0.5,
and weights that have nothing to do with each other to 1.4."""


@dataclass(frozen=True)
class Update:
    """One layer's update, whose matrix is ``scale * a b``."""

    path: str
    a: mx.array
    """``(in, rank)``; of an embedding ``(vocab_size, rank)``."""
    b: mx.array
    """``(rank, out)``; of an embedding ``(rank, model_dim)``."""
    alpha: float
    rslora: bool
    magnitudes: mx.array | None = None
    """DoRA's, ``(out,)``."""

    @property
    def rank(self) -> int:
        """Of the update."""
        return self.a.shape[1]

    @property
    def scale(self) -> float:
        """What `a b` is multiplied by."""
        return scale_of(self.alpha, self.rank, rslora=self.rslora)


def assembled(
    updates: Sequence[Update], model: OpenELMConfig, where: str | Path, *, dropout: float = 0.0, **origin: object
) -> Adapter:
    """One adapter of updates whose ranks and strengths may differ.

    Lower ranks are filled up with zeros and other strengths multiplied into `b`: the updates stay the same.

    Raises:
        AdapterError: there is no update, only some of the projections have magnitudes, or a number is not finite.
    """
    if not updates:
        raise AdapterError(f"{where}: holds no LoRA or DoRA tensors")
    projections = [u for u in updates if u.path != EMBEDDING]
    method = "dora" if any(u.magnitudes is not None for u in updates) else "lora"
    without = [u.path for u in projections if u.magnitudes is None]
    if method == "dora" and without:
        raise AdapterError(f"{where}: some layers have DoRA magnitudes and others none: {without[0]} has none")
    largest = max(updates, key=lambda u: u.rank)
    try:
        config = AdapterConfig(
            method=method,
            rank=largest.rank,
            alpha=largest.alpha,
            rslora=largest.rslora,
            dropout=dropout,
            targets=target_names((u.path for u in updates), model.num_transformer_layers),
        )
    except OpenELMError as e:
        raise AdapterError(f"{where}: {e}") from None
    tensors: dict[str, mx.array] = {}
    for u in updates:
        missing = config.rank - u.rank
        b = u.b.astype(mx.float32) * (u.scale / config.scale)
        tensors[f"{u.path}.lora_a"] = mx.pad(u.a.astype(mx.float32), [(0, 0), (0, missing)])
        tensors[f"{u.path}.lora_b"] = mx.pad(b, [(0, missing), (0, 0)])
        if u.magnitudes is not None:
            tensors[f"{u.path}.m"] = u.magnitudes.astype(mx.float32)
    check_finite(tensors, where)
    return Adapter(config, tensors, architecture(model), origin=dict(origin))


def target_names(paths: Iterable[str], layers: int | None) -> tuple[str, ...]:
    """Layers by their names where all of the model's `layers` have one of that name here, else by their paths."""
    by_name: dict[str, list[str]] = {name: [] for name in LINEARS}
    for path in paths:
        by_name.setdefault(path.rpartition(".")[2], []).append(path)
    names: list[str] = []
    for name, found in by_name.items():
        names += [name] if len(found) == layers or found in ([EMBEDDING], [HEAD]) else found
    return tuple(names)


def difference(mine: mx.array, theirs: mx.array, *, packed: bool) -> tuple[float, bool]:
    """The largest difference of two weights, and whether they are the same but for rounding.

    Args:
        mine: of our model, float32.
        theirs: another program's, of the same shape.
        packed: `mine` was quantized.
    """
    theirs = theirs.astype(mx.float32)
    gap = mx.abs(mine - theirs)
    if packed:
        same = mx.square(gap).sum() <= _ANOTHER**2 * mx.square(theirs).sum()
    else:
        same = (gap <= _ROUNDING * mx.maximum(mx.abs(mine), mx.abs(theirs)) + _TINY).all()
    return float(gap.max()), bool(same)
