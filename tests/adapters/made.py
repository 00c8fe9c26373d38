"""Adapters for tests: with values that a training might have left."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from openelm_mlx.adapters import Adapter, AdapterConfig, adapter_from, adapters_of, attach, detach, save_adapter
from openelm_mlx.model import OpenELM

IDS = [3, 141, 59, 26, 53, 58, 97, 3, 12]
LINEARS_AND_EMBEDDING = ("qkv_proj", "out_proj", "proj_1", "proj_2", "token_embeddings")


def array(x: mx.array) -> npt.NDArray[np.float64]:
    """As numpy has it, in float64."""
    return np.array(x.astype(mx.float32)).astype(np.float64)


def train(layer: nn.Module, seed: int = 0) -> None:
    """Give an adapted layer's parameters other values, as a training would."""
    for n, part in enumerate(("lora_a", "lora_b", "m")):
        if part in layer:
            noise = mx.random.normal(layer[part].shape, key=mx.random.key(10 * seed + n))
            layer[part] = layer[part] + (0.2 if part == "m" else 0.1) * noise
    mx.eval(layer.parameters())


def trained_adapter(model: OpenELM, *, precision: str | None = "fp32", **changes: object) -> Adapter:
    """An adapter for a model, which is left without."""
    config = AdapterConfig(**{"rank": 4, **changes})  # type: ignore[arg-type]
    attach(model, config)
    for n, layer in enumerate(adapters_of(model).values()):
        train(layer, n)
    adapter = adapter_from(model, config, precision=precision)
    detach(model)
    return adapter


def saved(folder: Path, adapter: Adapter) -> Path:
    """The folder, with the adapter in it."""
    folder.mkdir()
    save_adapter(folder, adapter)
    return folder


def logits(model: nn.Module) -> npt.NDArray[np.float64]:
    """Of a fixed prompt, all positions."""
    return array(model(mx.array([IDS]))[0])
