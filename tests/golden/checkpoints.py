"""Rebuilding the golden checkpoints, tensor by tensor, in the two layouts that people have."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml
from safetensors.numpy import save_file

from tests.support.torch_writer import Lazy, save_torch

BUNDLED = Path(__file__).parents[1] / "data" / "golden"
LAYOUTS = ("hf", "corenet")
SHARD_BYTES = 2_000_000_000

Tensors = dict[str, tuple[tuple[int, ...], Callable[[], npt.NDArray[np.float32]]]]


def weights_module(folder: Path) -> ModuleType:
    """The generator of the golden weights: the folder's own, or the one in tests/data."""
    path = next(p for p in (folder / "weights.py", BUNDLED / "weights.py") if p.is_file())
    spec = importlib.util.spec_from_file_location("golden_weights", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Checkpoint:
    """One golden case's weights, by CoreNet's names, made when they are written."""

    def __init__(self, folder: Path, case: str, seed: int) -> None:
        module = weights_module(folder)
        self.case: dict[str, Any] = module.CASES[case]
        self.common: dict[str, Any] = module.COMMON
        layers = module.layer_shapes(self.case)
        self.tensors: Tensors = {
            name: (shape, partial(module.weight, name, shape, seed, len(layers)))
            for name, shape in module.shapes(self.case, layers).items()
        }

    def write(self, layout: str, folder: Path) -> Path:
        """Write a source for the converter; returns its path."""
        folder.mkdir(parents=True)
        return self._write_hf(folder) if layout == "hf" else self._write_corenet(folder)

    def _write_hf(self, folder: Path) -> Path:
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(self._shards(), 1):
            name = f"model-{number:05d}.safetensors"
            save_file({_hf_name(n): self.tensors[n][1]() for n in shard}, folder / name, metadata={"format": "pt"})
            weight_map |= {_hf_name(n): name for n in shard}
        if len(set(weight_map.values())) == 1:
            (folder / "model-00001.safetensors").rename(folder / "model.safetensors")
        else:
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        config = {"model_type": "openelm", "bos_token_id": 1, "eos_token_id": 2, **self.common, **self.case}
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    def _write_corenet(self, folder: Path) -> Path:
        save_torch({n: Lazy(shape, "F32", make) for n, (shape, make) in self.tensors.items()}, folder / "checkpoint.pt")
        config = {
            "model": {
                "language_modeling": {"name": "general_gpt", "general_gpt": {"model_name": "golden", **self.case}}
            }
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        return folder / "checkpoint.pt"

    def _shards(self) -> Iterator[list[str]]:
        shard: list[str] = []
        size = 0
        for name, (shape, _) in self.tensors.items():
            nbytes = int(np.prod(shape)) * 4
            if shard and size + nbytes > SHARD_BYTES:
                yield shard
                shard, size = [], 0
            shard.append(name)
            size += nbytes
        yield shard


def _hf_name(name: str) -> str:
    return "lm_head.weight" if name == "classifier.weight" else f"transformer.{name}"
