"""Which precision every tensor of a conversion gets: the plan, and the tensors that come of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from openelm_mlx.config import OpenELMConfig
from openelm_mlx.convert.choices import check_precision
from openelm_mlx.errors import CheckpointError, OpenELMError
from openelm_mlx.loading import check_float16
from openelm_mlx.model import OpenELM
from openelm_mlx.quantize import Plan, Quantization, plan_to_config, quantize_weight, uniform_plan
from openelm_mlx.rawtensor import RawTensor
from openelm_mlx.writer import TensorSpec

_BLOCK = 1 << 22
"""Elements of a tensor that are converted at a time."""

_DTYPES = {"bf16": mx.bfloat16, "fp16": mx.float16, "fp32": mx.float32}


@dataclass(frozen=True)
class Precision:
    """A conversion's target: the dtype of what stays in full precision, and how each layer is packed."""

    name: str
    dtype: mx.Dtype
    default: Quantization | None
    layers: Plan

    @property
    def kept(self) -> list[str]:
        """Layers that stay in full precision although packing was asked for."""
        return [path for path, q in self.layers.items() if q is None] if self.default else []

    def to_config(self) -> dict[str, Any] | None:
        """config.json's ``quantization``; None for full precision."""
        return plan_to_config(self.layers, self.default) if self.default else None


def plan_precision(config: OpenELMConfig, name: str, group_size: int) -> Precision:
    """The plan for one of the precisions of :mod:`openelm_mlx.convert.choices`.

    Raises:
        OpenELMError: an unknown name or group size, float16 for the 3B, or a group size that divides no layer.
    """
    check_precision(name, group_size)
    if name in _DTYPES:
        if name == "fp16":
            check_float16(config, "storing")
        return Precision(name, _DTYPES[name], None, {})
    default = Quantization(int(name.removesuffix("bit")), group_size)
    layers = uniform_plan(OpenELM(config), default)
    if not any(layers.values()):
        raise OpenELMError(
            f"group size {group_size} divides the width of no layer; use a smaller one, or --precision bf16"
        )
    # Scales and what is not packed are bfloat16, as mlx_lm.convert writes them.
    return Precision(name, mx.bfloat16, default, layers)


def specs(tensors: Mapping[str, tuple[int, ...]], precision: Precision) -> Iterator[TensorSpec]:
    """Every tensor that will be written, in order, for source tensors of these shapes."""
    for name, shape in tensors.items():
        path = name.removesuffix(".weight")
        q = precision.layers.get(path)
        if q is None:
            yield TensorSpec(name, precision.dtype, shape)
            continue
        rows, width = shape
        yield TensorSpec(name, mx.uint32, (rows, width * q.bits // 32))
        yield TensorSpec(f"{path}.scales", precision.dtype, (rows, width // q.group_size))
        yield TensorSpec(f"{path}.biases", precision.dtype, (rows, width // q.group_size))


def converted(
    tensors: Mapping[str, RawTensor],
    shapes: Mapping[str, tuple[int, ...]],
    precision: Precision,
    read: Callable[[int], None] = lambda nbytes: None,
) -> Iterator[mx.array]:
    """The tensors that :func:`specs` announces; each source tensor is read, converted and let go in turn.

    `shapes` may have fewer rows than the source (dropped padding). `read` is told the bytes of each source tensor.
    """
    for name, tensor in tensors.items():
        q = precision.layers.get(name.removesuffix(".weight"))
        parts = []
        for start, block in _blocks(tensor, shapes[name][0]):
            try:
                parts.append(_convert(block, q, precision))
            except CheckpointError as e:
                raise CheckpointError(f"tensor {name}, from row {start} on: {e}") from None
        yield from (p[0] if len(p) == 1 else mx.concatenate(list(p)) for p in zip(*parts, strict=True))
        del parts
        read(tensor.nbytes)
        mx.clear_cache()


def _blocks(tensor: RawTensor, rows: int) -> Iterator[tuple[int, mx.array]]:
    """The first `rows` rows, some at a time: a large tensor is never in memory whole in its source's precision."""
    row = tensor.size // tensor.shape[0]
    step = max(1, _BLOCK // row)
    stride = tensor.strides[0] if tensor.strides else row
    for start in range(0, rows, step):
        shape = (min(step, rows - start), *tensor.shape[1:])
        yield start, replace(tensor, offset=tensor.offset + start * stride * tensor.itemsize, shape=shape).read()


def _convert(x: mx.array, q: Quantization | None, precision: Precision) -> tuple[mx.array, ...]:
    if q is not None:
        arrays = quantize_weight(x, q, precision.dtype)
        mx.eval(arrays)
        return arrays
    y = x.astype(precision.dtype)
    if not bool(mx.isfinite(y).all()):
        if bool(mx.isfinite(x).all()):
            raise CheckpointError(f"it has values that {precision.name} cannot hold; use --precision bf16 or fp32")
        raise CheckpointError("it has NaN or infinity, so the checkpoint is damaged")
    return (y,)
