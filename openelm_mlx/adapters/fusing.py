"""Fusing: the weights of a plain model that does what a base does with an adapter, one tensor in memory at a time."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from openelm_mlx.adapters.config import AdapterError
from openelm_mlx.adapters.files import Adapter, check_fits
from openelm_mlx.adapters.layers import PARTS, adapted, weight_of
from openelm_mlx.checkpoint import open_weights
from openelm_mlx.config import OpenELMConfig
from openelm_mlx.dtypes import STORED, dtype_name, precision_name
from openelm_mlx.errors import CheckpointError
from openelm_mlx.layer_paths import EMBEDDING, HEAD
from openelm_mlx.loading import (
    build,
    check_float16,
    config_of,
    parameter_shapes,
    precision_of,
    read_model_config,
    stored_dtype,
)
from openelm_mlx.model import OpenELM
from openelm_mlx.quantize import Quantization, quantize_weight
from openelm_mlx.writer import TensorSpec

_STORED = {**STORED, "F64": mx.float32}
"""What tensors of these stored dtypes are read, and written again, as."""

_PACKABLE = (2, 4, 8)


class Fusion:
    """A base's folder and an adapter, and what comes of them.

    The update of an embedding changes the rows that ids are looked up in and leaves the output head alone: a base whose
    two are tied becomes a model in which they are not.

    Args:
        folder: of the base: converted or not, packed or not.
        adapter: to fuse into it.
        where: names the adapter in messages.
        dtype: of the result; None for the base's own, which is bfloat16 where it is packed.
        requantize: pack again what was packed and has an adapter. Everything else stays bit for bit as it is.

    Raises:
        OpenELMError: the adapter does not fit, or the base cannot be read or packed again.
    """

    def __init__(
        self,
        folder: Path,
        adapter: Adapter,
        where: str | Path,
        *,
        dtype: mx.Dtype | None = None,
        requantize: bool = False,
    ) -> None:
        self.values = read_model_config(folder)
        """config.json of the base."""
        base = config_of(self.values, folder / "config.json")
        self._folder, self._adapter, self._tensors = folder, adapter, open_weights(folder)
        model = build(base, self.values.get("quantization"), self._tensors, folder)
        check_fits(model, adapter, where)
        self._layers = dict(model.named_modules())
        self._requantize = requantize
        packed = [path for path in self._layers if self._packed(path)]
        if requantize:
            _check_packable(folder, [self._layers[path] for path in packed])
        self.base_precision = precision_of(self.values, self._tensors)
        self.dtype = dtype or (mx.bfloat16 if packed and not requantize else stored_dtype(self._tensors))
        """Of what is not packed."""
        if self.dtype == mx.float16 and dtype is not None:
            check_float16(base, "storing")
        self.unties = base.share_input_output_layers and EMBEDDING in adapter.paths
        """Whether the output head, tied in the base, has weights of its own in the result."""
        self.config: OpenELMConfig = dataclasses.replace(base, share_input_output_layers=False) if self.unties else base
        self._shapes = parameter_shapes(OpenELM(self.config))

    @property
    def precision(self) -> str:
        """What the result is stored in, as :func:`openelm_mlx.loading.precision_of` says it."""
        if self._requantize:
            return self.base_precision
        return precision_name(self.dtype)

    def config_json(self) -> dict[str, Any]:
        """config.json of the result, without its provenance."""
        values = {**self.config.to_dict(), "torch_dtype": dtype_name(self.dtype)}
        if not self._requantize:
            return values
        quantization = dict(self.values["quantization"])
        if self.unties and EMBEDDING in quantization:
            quantization[HEAD] = quantization[EMBEDDING]
        return {**values, "quantization": quantization}

    def specs(self) -> list[TensorSpec]:
        """Every tensor of the result, in the order of :meth:`arrays`."""
        return [spec for name in self._shapes for spec in self._specs_of(name)]

    def arrays(self, done: Callable[[int], None] = lambda nbytes: None) -> Iterator[mx.array]:
        """The tensors that :meth:`specs` announces; each layer is read, fused and let go in turn.

        `done` is told the bytes that each came of.

        Raises:
            CheckpointError: a weight is not finite, cannot be read or cannot be packed.
        """
        for name in self._shapes:
            path = self._source(name)
            try:
                yield from self._arrays_of(path, is_head=self._is_new_head(name))
            except CheckpointError as e:
                raise CheckpointError(f"{self._folder}: {name}: {e}") from None
            done(sum(self._tensors[key].nbytes for key in self._keys(path)))
            mx.clear_cache()

    @property
    def nbytes_read(self) -> int:
        """Bytes that :meth:`arrays` reads of the base."""
        return sum(self._tensors[key].nbytes for name in self._shapes for key in self._keys(self._source(name)))

    def _is_new_head(self, name: str) -> bool:
        return self.unties and name == f"{HEAD}.weight"

    def _source(self, name: str) -> str:
        """The base's layer that a weight comes of."""
        return EMBEDDING if self._is_new_head(name) else name.removesuffix(".weight")

    def _packed(self, path: str) -> bool:
        return f"{path}.scales" in self._tensors

    def _keys(self, path: str) -> list[str]:
        """The base's tensors that make up a layer's weight."""
        return [key for part in ("weight", "scales", "biases") if (key := f"{path}.{part}") in self._tensors]

    def _stays(self, path: str, *, is_head: bool) -> bool:
        """Whether a layer's tensors are written as they are read."""
        return self._requantize and (is_head or path not in self._adapter.paths)

    def _specs_of(self, name: str) -> Iterator[TensorSpec]:
        path, is_head = self._source(name), self._is_new_head(name)
        as_stored = [(key.rpartition(".")[2], self._tensors[key]) for key in self._keys(path)]
        own = name.removesuffix(".weight")
        if self._stays(path, is_head=is_head):
            yield from (TensorSpec(f"{own}.{part}", _STORED[t.dtype], t.shape) for part, t in as_stored)
        elif self._requantize and self._packed(path):
            rows, width = self._shapes[name]
            how, dtype = _quantization(self._layers[path]), self._scales_dtype(path)
            yield TensorSpec(name, mx.uint32, (rows, width * how.bits // 32))
            yield TensorSpec(f"{own}.scales", dtype, (rows, width // how.group_size))
            yield TensorSpec(f"{own}.biases", dtype, (rows, width // how.group_size))
        else:
            yield TensorSpec(name, self._dtype_of(path), self._shapes[name])

    def _arrays_of(self, path: str, *, is_head: bool) -> Iterator[mx.array]:
        if self._stays(path, is_head=is_head):
            yield from (self._tensors[key].read() for key in self._keys(path))
            return
        weight = self._weight(path, fused=not is_head and path in self._adapter.paths)
        if self._requantize and self._packed(path):
            yield from quantize_weight(weight, _quantization(self._layers[path]), self._scales_dtype(path))
        else:
            yield _cast(weight, self._dtype_of(path))

    def _dtype_of(self, path: str) -> mx.Dtype:
        return _STORED[self._tensors[f"{path}.weight"].dtype] if self._requantize else self.dtype

    def _scales_dtype(self, path: str) -> mx.Dtype:
        return _STORED[self._tensors[f"{path}.scales"].dtype]

    def _weight(self, path: str, *, fused: bool) -> mx.array:
        """A layer's weight, unpacked; with its update if `fused`, in float32 then."""
        layer = copy.copy(self._layers[path])  # what is read must not stay in the model
        for key in self._keys(path):
            layer[key.rpartition(".")[2]] = self._tensors[key].read()
        if not fused:
            return weight_of(layer) if self._packed(path) else layer.weight
        both = adapted(layer, self._adapter.config, mx.random.key(0))
        for part in PARTS:
            if (value := self._adapter.tensors.get(f"{path}.{part}")) is not None:
                both[part] = value
        return both.fused_weight()


def _cast(x: mx.array, dtype: mx.Dtype) -> mx.array:
    y = x.astype(dtype)
    if not bool(mx.isfinite(y).all()):
        if bool(mx.isfinite(x).all()):
            raise CheckpointError(f"it has values that {dtype_name(dtype)} cannot hold; use --precision bf16 or fp32")
        raise CheckpointError("it has NaN or infinity, so the base or the adapter is damaged")
    return y


def _quantization(layer: nn.Module) -> Quantization:
    return Quantization(layer.bits, layer.group_size, layer.mode)


def _check_packable(folder: Path, packed: list[nn.Module]) -> None:
    if not packed:
        raise AdapterError(f"{folder}: is not packed, so there is nothing to pack again; leave --requantize out")
    for layer in packed:
        how = _quantization(layer)
        if how.mode != "affine" or how.bits not in _PACKABLE:
            raise AdapterError(
                f"{folder}: layers of {how.bits} bits ({how.mode}) cannot be packed again here (affine ones of "
                f"{', '.join(map(str, _PACKABLE))} bits can); leave --requantize out and pack the result with "
                "mlx_lm.convert"
            )
