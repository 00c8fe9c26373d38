"""Applying a quantization plan: which layers are packed, how, and how config.json says so.

The form is mlx-lm's: ``{"group_size": 64, "bits": 4, "mode": "affine", "<path>": false}``, where a path's own entry
overrides the default.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from openelm_mlx.dtypes import dtype_name
from openelm_mlx.errors import CheckpointError, ConfigError


@dataclass(frozen=True)
class Quantization:
    """Affine quantization of one layer: `bits` a weight, one scale and one bias for each `group_size` weights."""

    bits: int
    group_size: int = 64
    mode: str = "affine"

    def fits(self, width: int) -> bool:
        """Whether rows of `width` weights divide into groups."""
        return width % self.group_size == 0


Plan = dict[str, Quantization | None]
"""Layer path -> how it is quantized; None: kept in full precision."""


def quantizable(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that can be packed, by path."""
    return {path: layer for path, layer in model.named_modules() if hasattr(layer, "to_quantized")}


def uniform_plan(model: nn.Module, quantization: Quantization) -> Plan:
    """The same quantization for every layer whose width its groups divide; None for the others."""
    return {
        path: quantization if quantization.fits(layer.weight.shape[-1]) else None
        for path, layer in sorted(quantizable(model).items())
    }


def plan_to_config(plan: Plan, default: Quantization) -> dict[str, Any]:
    """The ``quantization`` entry of config.json for a plan."""
    own = {path: False if q is None else asdict(q) for path, q in plan.items() if q != default}
    return {**asdict(default), **own}


def apply_config(model: nn.Module, quantization: Mapping[str, Any], names: Collection[str]) -> None:
    """Turn a model's layers into the packed ones that a checkpoint holds.

    Args:
        model: the freshly built model; changed in place.
        quantization: config.json's ``quantization``.
        names: the checkpoint's tensor names; a layer without scales there stays as it is.
    """
    try:
        group_size, bits = int(quantization["group_size"]), int(quantization["bits"])
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ConfigError(f"config.json: quantization has no bits and group_size: {quantization!r}") from None

    def choose(path: str, layer: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(layer, "to_quantized") or f"{path}.scales" not in names:
            return False
        own = quantization.get(path, True)
        return dict(own) if isinstance(own, Mapping) else bool(own)

    try:
        nn.quantize(model, group_size, bits, mode=quantization.get("mode", "affine"), class_predicate=choose)
    except (KeyError, TypeError, ValueError, RuntimeError) as e:
        raise CheckpointError(f"this version of MLX cannot hold the checkpoint's quantization: {e}") from None


_REFINEMENTS = 3
"""Least-squares rounds; more gain less than a hundredth of the error."""

_BLOCK = 1 << 22
"""Weights fitted at a time: keeps the temporaries in megabytes, whatever the matrix."""


def quantize_weight(weight: mx.array, how: Quantization, dtype: mx.Dtype) -> tuple[mx.array, mx.array, mx.array]:
    """Pack a weight with the smallest squared error found, in MLX's affine format.

    ``mx.quantize`` spreads the levels from each group's minimum to its maximum. Starting there, scale and bias are
    fitted to the rounded weights by least squares and the weights rounded again, a few times; each group keeps its
    best round, so no group is worse than ``mx.quantize`` makes it.

    Args:
        weight: ``(rows, width)``; `width` a multiple of the group size.
        how: bits and group size.
        dtype: of the scales and biases; the fit takes their rounding into account.

    Returns:
        Packed weights ``(rows, width * bits / 32)`` uint32, scales and biases ``(rows, width / group_size)``.

    Raises:
        CheckpointError: the weight has a NaN or an infinity, or is too large for scales of this dtype.
        ValueError: other bits than 2, 4 and 8, or another mode than affine.
    """
    if how.mode != "affine" or how.bits not in (2, 4, 8):
        raise ValueError(f"{how.bits} bits ({how.mode}) are not packed here")
    rows, width = weight.shape
    step = max(1, _BLOCK // width)
    blocks = []
    for start in range(0, rows, step):
        block = weight[start : start + step]
        fitted = _fit_block(block, how, dtype)
        finite = [mx.isfinite(x).all() for x in (block, *fitted[1:])]
        mx.eval(fitted, finite)
        if not all(bool(ok) for ok in finite):
            raise CheckpointError(
                f"the weight cannot be packed: in rows {start} to {start + len(block) - 1} it has NaN, infinity, "
                f"or values whose scale {dtype_name(dtype)} cannot hold"
            )
        blocks.append(fitted)
    packed, scales, biases = (mx.concatenate(list(parts)) for parts in zip(*blocks, strict=True))
    return packed, scales, biases


def _fit_block(weight: mx.array, how: Quantization, dtype: mx.Dtype) -> tuple[mx.array, mx.array, mx.array]:
    rows = weight.shape[0]
    x = weight.astype(mx.float32).reshape(rows, -1, how.group_size)
    _, scale, bias = mx.quantize(weight, how.group_size, how.bits, mode=how.mode)
    scale, bias = _stored(scale[..., None], dtype), _stored(bias[..., None], dtype)
    best = (mx.full(scale.shape, mx.inf), scale, bias)
    for _ in range(_REFINEMENTS + 1):
        levels = _levels(x, scale, bias, how.bits)
        error = mx.square(levels * scale + bias - x).sum(-1, keepdims=True)
        better = error < best[0]
        best = (mx.minimum(error, best[0]), mx.where(better, scale, best[1]), mx.where(better, bias, best[2]))
        scale, bias = (_stored(fitted, dtype) for fitted in _least_squares(x, levels))
    _, scale, bias = best
    levels = _levels(x, scale, bias, how.bits).astype(mx.uint32).reshape(rows, -1, 32 // how.bits)
    packed = (levels << (mx.arange(32 // how.bits, dtype=mx.uint32) * how.bits)).sum(-1)
    return packed.astype(mx.uint32), scale[..., 0].astype(dtype), bias[..., 0].astype(dtype)


def _stored(x: mx.array, dtype: mx.Dtype) -> mx.array:
    return x.astype(dtype).astype(mx.float32)


def _levels(x: mx.array, scale: mx.array, bias: mx.array, bits: int) -> mx.array:
    # The fit of a group with one level has scale 0: every level is the bias then, and 0 is as good as any.
    return mx.clip(mx.round((x - bias) / mx.where(scale == 0, 1, scale)), 0, 2**bits - 1)


def _least_squares(x: mx.array, levels: mx.array) -> tuple[mx.array, mx.array]:
    """The scale and bias that bring ``levels * scale + bias`` closest to `x`, group by group."""
    mean_x, mean_l = x.mean(-1, keepdims=True), levels.mean(-1, keepdims=True)
    spread = levels - mean_l
    variance = mx.square(spread).sum(-1, keepdims=True)
    scale = ((x - mean_x) * spread).sum(-1, keepdims=True) / mx.where(variance == 0, 1, variance)
    return scale, mean_x - scale * mean_l


def dequantized(layer: nn.Module, dtype: mx.Dtype) -> nn.Module:
    """The plain layer with the same values as a packed one, in `dtype`; other layers come back as they are."""
    if not isinstance(layer, (nn.QuantizedLinear, nn.QuantizedEmbedding)):
        return layer
    biases = layer.get("biases")
    weight = mx.dequantize(
        layer.weight,
        layer.scales.astype(dtype) if biases is not None else layer.scales,
        None if biases is None else biases.astype(dtype),
        group_size=layer.group_size,
        bits=layer.bits,
        mode=layer.mode,
        dtype=dtype,
    )
    rows, columns = weight.shape
    plain = (
        nn.Linear(columns, rows, bias=False) if isinstance(layer, nn.QuantizedLinear) else nn.Embedding(rows, columns)
    )
    plain.weight = weight
    return plain
