"""Adapters for tests: random ones on golden models, and what other programs' rules make of their files in numpy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from openelm_mlx.adapters import LINEARS, Adapter, AdapterConfig, adapter_from, adapters_of, attach, attach_adapter
from openelm_mlx.adapters.layers import weight_of
from openelm_mlx.config import OpenELMConfig
from openelm_mlx.model import OpenELM
from tests.support.models import golden_model

Array = npt.NDArray[np.float32]

EMBEDDING = "transformer.token_embeddings"
EVERYTHING = (*LINEARS, "token_embeddings")
PROMPT = [1, 17, 250, 3, 99, 42, 200, 5]


def random_adapter(model: OpenELM, *, seed: int = 1, **settings: Any) -> Adapter:
    """An adapter that changes a lot; the model is left without it."""
    config = AdapterConfig(**{"rank": 4, "alpha": 8, **settings})
    with_adapter = OpenELM(model.config)
    with_adapter.update(model.parameters())
    attach(with_adapter, config)
    rng = np.random.default_rng(seed)
    for layer in adapters_of(with_adapter).values():
        layer.lora_a = mx.array(rng.normal(size=layer.lora_a.shape).astype(np.float32) / 4)
        layer.lora_b = mx.array(rng.normal(size=layer.lora_b.shape).astype(np.float32) / 4)
        if "m" in layer:
            layer.m = layer.m * mx.array(rng.uniform(0.7, 1.4, layer.m.shape).astype(np.float32))
    return adapter_from(with_adapter, config, precision="fp32")


def logits(model: OpenELM, adapter: Adapter | None = None) -> Array:
    """Logits of the prompt, ``(L, V)``, with an adapter or as the model is."""
    if adapter is not None:
        attach_adapter(model, adapter, "an adapter")
    return np.asarray(model(mx.array([PROMPT]))[0].astype(mx.float32))


def distance(a: Array, b: Array) -> float:
    """The largest absolute difference."""
    return float(np.abs(a - b).max())


def merged(model: OpenELM, weights: Mapping[str, Array]) -> OpenELM:
    """The model with other weights for some layers (by path); its output head stays what it was."""
    values = {**model.config.to_dict(), "share_input_output_layers": False}
    plain = OpenELM(OpenELMConfig.from_dict(values))
    plain.update(model.parameters())
    if model.config.share_input_output_layers:
        plain.lm_head.weight = model.transformer.token_embeddings.weight
    plain.load_weights([(f"{path}.weight", mx.array(w)) for path, w in weights.items()], strict=False)
    return plain


def peft_weights(model: OpenELM, tensors: Mapping[str, Array], config: Mapping[str, Any]) -> dict[str, Array]:
    """Layer -> the weight that PEFT's merging makes of it: its papers' formulas, with the ranks and alphas of a config.

    `config` has, for every layer, ``(alpha, rank)`` under ``of`` or one ``lora_alpha`` and ``r``.
    """
    layers = dict(model.named_modules())
    result: dict[str, Array] = {}
    for path in sorted({name.split(".lora_")[0] for name in tensors}):
        p, base = path.removeprefix("base_model.model."), f"{path}."
        alpha, rank = config.get("of", {}).get(p, (config["lora_alpha"], config["r"]))
        scale = alpha / (rank**0.5 if config["use_rslora"] else rank)
        weight = np.asarray(weight_of(layers[p]))
        if p == EMBEDDING:
            delta = (tensors[f"{base}lora_embedding_B"] @ tensors[f"{base}lora_embedding_A"]).T
        else:
            delta = tensors[f"{base}lora_B.weight"] @ tensors[f"{base}lora_A.weight"]
        new = weight + scale * delta
        if config["use_dora"]:
            # By rows; of an embedding, which PEFT sees transposed, by columns.
            axis = 0 if p == EMBEDDING else 1
            factor = tensors[f"{base}lora_magnitude_vector"] / np.linalg.norm(new, axis=axis)
            new = new * np.expand_dims(factor, axis)
        result[p] = new.astype(np.float32)
    return result


def names_of(folder: Path) -> set[str]:
    """The files of a folder."""
    return {p.name for p in folder.iterdir()}


def golden(case: str = "tiny-tied") -> OpenELM:
    """A golden model, ready to run."""
    model = golden_model(case)
    model.eval()
    return model


def numpy_of(tensors: Mapping[str, mx.array], names: Iterable[str] | None = None) -> dict[str, Array]:
    """Tensors as numpy has them."""
    return {name: np.asarray(tensors[name]) for name in (tensors if names is None else names)}
