"""Models to measure: a folder's, or one of a released size with random weights, since speed depends on shapes alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path

from openelm_mlx import loading
from openelm_mlx.config import OpenELMConfig
from openelm_mlx.errors import OpenELMError
from openelm_mlx.model import OpenELM

PRECISIONS = {"bf16": (mx.bfloat16, None), "fp16": (mx.float16, None), "fp32": (mx.float32, None)} | {
    f"{bits}bit": (mx.bfloat16, bits) for bits in (4, 8)
}
"""Name -> dtype of what is stored in full precision, and bits of the packed layers."""

GROUP_SIZE = 64


def stored_as(precision: str) -> tuple[mx.Dtype, int | None]:
    """Dtype of what is stored in full precision, and bits of the packed layers.

    Raises:
        OpenELMError: the name is none of `PRECISIONS`.
    """
    if precision not in PRECISIONS:
        raise OpenELMError(f"precision {precision!r} is not known; use one of {', '.join(PRECISIONS)}")
    return PRECISIONS[precision]


@dataclass(frozen=True)
class Subject:
    """A model to measure: a local folder, or a preset with random weights."""

    name: str
    """What tables call it."""
    folder: Path | None = None
    preset: str | None = None
    precision: str = "stored"
    """One of `PRECISIONS` for a preset; ``stored`` for a folder."""

    def to_json(self) -> dict[str, Any]:
        """As plain values, for a worker process."""
        return {**self.__dict__, "folder": str(self.folder) if self.folder else None}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Subject:
        """The inverse of :meth:`to_json`."""
        return cls(**{**values, "folder": Path(values["folder"]) if values["folder"] else None})

    def config(self) -> OpenELMConfig:
        """The architecture."""
        if self.folder is None:
            assert self.preset
            return OpenELMConfig.preset(self.preset)
        return loading.config_of(loading.read_model_config(self.folder), self.folder / "config.json")


def load_subject(subject: Subject, *, cpu_weights: str | None = None, dtype: str | None = None) -> OpenELM:
    """The model, as :func:`openelm_mlx.load` makes it ready."""
    if subject.folder is not None:
        return loading.load_model(subject.folder, dtype=dtype, cpu_weights=cpu_weights)
    return random_model(subject.config(), subject.precision, cpu_weights=cpu_weights, dtype=dtype)


def random_model(
    config: OpenELMConfig, precision: str, *, cpu_weights: str | None = None, dtype: str | None = None
) -> OpenELM:
    """A model with random weights, made ready as :func:`openelm_mlx.load` does with those of a file."""
    model = OpenELM(config)
    fill_randomly(model, precision)
    target = loading.target_dtype(stored_as(precision)[0], dtype)
    loading.make_ready(model, target, cpu_weights=cpu_weights, keep_bfloat16=dtype is None)
    loading.evaluate(model)
    return model


def fill_randomly(model: nn.Module, precision: str, seed: int = 0) -> None:
    """Give any model's matrices small random values and its norms ones, one tensor at a time; then pack it if asked.

    Works for mlx-lm's models too. Raises :class:`OpenELMError` for an unknown precision.
    """
    dtype, bits = stored_as(precision)
    keys = iter(mx.random.split(mx.random.key(seed), 4096))

    def values(path: str, parameter: mx.array) -> mx.array:
        if parameter.ndim < 2:
            filled = mx.zeros(parameter.shape, dtype) if path.endswith("bias") else mx.ones(parameter.shape, dtype)
        else:
            filled = (mx.random.normal(parameter.shape, key=next(keys)) * 0.02).astype(dtype)
        mx.eval(filled)
        return filled

    model.update(tree_map_with_path(values, model.parameters()))
    if bits:
        pack(model, bits)
        mx.eval(model.parameters())


def pack(model: nn.Module, bits: int) -> None:
    """Pack what a conversion packs: every matrix whose rows groups of 64 divide. Works for mlx-lm's models too."""

    def fits(path: str, layer: nn.Module) -> bool:
        return hasattr(layer, "to_quantized") and layer.weight.shape[-1] % GROUP_SIZE == 0

    nn.quantize(model, GROUP_SIZE, bits, class_predicate=fits)
