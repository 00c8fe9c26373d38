"""The model an adapter belongs to, as a folder whose weights are read one at a time."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from openelm_mlx import hub
from openelm_mlx.adapters import Adapter
from openelm_mlx.adapters.files import check_fits
from openelm_mlx.adapters.layers import shape_of, weight_of
from openelm_mlx.checkpoint import PROVENANCE, open_weights
from openelm_mlx.config import OpenELMConfig
from openelm_mlx.loading import build, config_of, read_model_config
from openelm_mlx.model import OpenELM
from openelm_mlx.rawtensor import RawTensor


@dataclass(frozen=True)
class BaseModel:
    """A model folder; only its config and the headers of its weights have been read."""

    folder: Path
    values: dict[str, Any]
    """config.json."""
    config: OpenELMConfig
    tensors: dict[str, RawTensor]

    @classmethod
    def open(cls, name_or_path: str | Path, *, revision: str | None = None) -> BaseModel:
        """Open a folder, or a Hugging Face repository by name.

        Raises:
            OpenELMError: there is none, or its files do not fit together.
        """
        folder = hub.resolve(name_or_path, revision=revision)
        values = read_model_config(folder)
        base = cls(folder, values, config_of(values, folder / "config.json"), open_weights(folder))
        _ = base._layers  # its names and shapes are checked
        return base

    @cached_property
    def _layers(self) -> dict[str, nn.Module]:
        """The model's layers, not filled: only what they are, and how they are packed, is asked of them."""
        model = build(self.config, self.values.get("quantization"), self.tensors, self.folder)
        return dict(model.named_modules())

    @property
    def hub_name(self) -> str | None:
        """The Hugging Face checkpoint it was converted from; None if that is not known."""
        provenance = self.values.get(PROVENANCE, {})
        source = provenance.get("source")
        is_name = isinstance(source, str) and provenance.get("source_commit") is not None
        return source if is_name else None

    def packed(self, path: str) -> bool:
        """Whether a layer's weights are quantized."""
        return f"{path}.scales" in self.tensors

    def shape(self, path: str) -> tuple[int, ...] | None:
        """The shape of a layer's weight, unpacked; None if there is no such layer."""
        if f"{path}.weight" not in self.tensors:
            return None
        layer = self._layers[path]
        return shape_of(layer) if self.packed(path) else tuple(layer.weight.shape)

    def weight(self, path: str) -> mx.array:
        """The weight of a projection, embedding or norm: read now, float32, unpacked.

        Raises:
            CheckpointError: it cannot be read.
        """
        layer = copy.copy(self._layers[path])
        layer.update({name: self.tensors[f"{path}.{name}"].read() for name in layer.parameters()})
        return weight_of(layer)

    def check_fit(self, adapter: Adapter, where: str | Path) -> None:
        """Refuse an adapter that this model cannot hold; `where` names it.

        Raises:
            AdapterError: names, shapes or the rank do not fit.
        """
        check_fits(OpenELM(self.config), adapter, where)
