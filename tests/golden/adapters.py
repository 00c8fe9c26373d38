"""CoreNet's adapter checkpoints, rebuilt, imported and run on their base."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import yaml

from openelm_mlx.adapters import attach_adapter, read_adapter
from openelm_mlx.cache import make_cache
from openelm_mlx.convert.job import convert
from openelm_mlx.finetune.transfer import import_adapter
from openelm_mlx.loading import load_model
from openelm_mlx.model import OpenELM
from tests.golden.checkpoints import Checkpoint, weights_module
from tests.support.torch_writer import Lazy, save_torch

Array = npt.NDArray[np.float32]


def write_checkpoint(folder: Path, golden: dict[str, Any], where: Path) -> tuple[Path, Path]:
    """The ``.pt`` that a golden file describes, and CoreNet's YAML for it; `folder` has weights.py."""
    module = weights_module(folder)
    layers, seed = golden["layers"], golden["seed"]

    def make(name: str, shape: tuple[int, ...]) -> Array:
        if "lora_magnitude_vector" in name:
            return np.float32(1) + np.float32(0.5) * module.uniform(name, shape, seed)
        if "lora_" in name:
            return module.uniform(name, shape, seed) * np.float32(0.5)
        return module.weight(name.replace(".base_layer", ""), shape, seed, layers)

    where.mkdir(parents=True, exist_ok=True)
    tensors = {n: Lazy(tuple(s), "F32", partial(make, n, tuple(s))) for n, s in golden["tensors"].items()}
    save_torch(tensors, where / "adapter.pt")
    (where / "adapter.yaml").write_text(yaml.safe_dump({"model": {"lora": {"config": golden["lora_config"]}}}))
    return where / "adapter.pt", where / "adapter.yaml"


def deviation(path: Path, golden: dict[str, Any], tmp: Path) -> tuple[float, float]:
    """How far the logits are from the golden file's: the whole prompt at once, and token by token with a cache."""
    checkpoint = Checkpoint(path.parent, golden["case"], golden["seed"])
    base = convert(checkpoint.write("hf", tmp / "source"), tmp / "base", precision="fp32", tokenizer="none").folder
    described = {**golden, "layers": checkpoint.case["num_transformer_layers"]}
    file, config = write_checkpoint(path.parent, described, tmp / "corenet")
    import_adapter(file, tmp / "adapter", base, config=config)
    model = load_model(base, dtype="float32")
    attach_adapter(model, read_adapter(tmp / "adapter"), tmp / "adapter")
    with np.load(path.with_suffix(".npz")) as arrays:
        expected = arrays["logits"]
    whole = _logits(model, [golden["prompt"]], cached=False)
    by_token = _logits(model, [[token] for token in golden["prompt"]], cached=True)
    return float(np.abs(whole - expected).max()), float(np.abs(by_token - expected).max())


def _logits(model: OpenELM, chunks: list[list[int]], *, cached: bool) -> Array:
    cache = make_cache(model) if cached else None
    return np.concatenate([np.asarray(model(mx.array([chunk]), cache=cache)[0]) for chunk in chunks])
