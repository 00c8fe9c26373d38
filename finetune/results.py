"""Putting what a run trained where it is used from: the adapter's two files, or a whole model, at the run's top."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from openelm_mlx import files
from openelm_mlx.adapters import AdapterConfig, adapter_from, save_adapter
from openelm_mlx.checkpoint import PROVENANCE, copy_generation
from openelm_mlx.dtypes import dtype_name, precision_name
from openelm_mlx.finetune.data.corpus import weighted_paths
from openelm_mlx.finetune.run_folder import RunError, RunFolder
from openelm_mlx.finetune.settings import Settings
from openelm_mlx.model import OpenELM
from openelm_mlx.tokenizer import Tokenizer
from openelm_mlx.trees import flat
from openelm_mlx.version import __version__
from openelm_mlx.writer import TensorSpec, write_json, write_weights

_NEW = ".new-result"


def adapter_config(settings: Settings) -> AdapterConfig:
    """The adapter that a run's settings ask for."""
    s = settings
    return AdapterConfig(
        method=s.method,
        rank=s.rank,
        alpha=s.alpha,
        dropout=s.dropout,
        rslora=s.rslora,
        targets=s.targets,
        layers=s.layers,
    )


def publish_adapter(run: Path, model: OpenELM, settings: Settings, base_precision: str) -> None:
    """Write the two files of the model's adapter, as it is now, at the run's top."""
    origin = {"base_model": settings.model, "base_revision": settings.revision}
    adapter = adapter_from(model, adapter_config(settings), precision=base_precision, **origin)
    _put(run, lambda folder: save_adapter(folder, adapter), last="adapters.safetensors")


def publish_model(run: Path, model: OpenELM, settings: Settings, tokenizer: Tokenizer, source: Path | None) -> None:
    """Write the whole model, as it is now, at the run's top: an ordinary model folder."""

    def fill(folder: Path) -> None:
        arrays = flat(model.parameters())
        specs = [TensorSpec(name, a.dtype, tuple(a.shape)) for name, a in arrays.items()]
        write_weights(folder, specs, arrays.values())
        tokenizer.save(folder)
        if source is not None:
            copy_generation(source, folder)
        dtype = model.transformer.norm.weight.dtype
        told = {
            "tool_version": __version__,
            "source": settings.subject,
            "source_kind": "finetune" if source is not None else "new",
            "precision": precision_name(dtype),
            "finetuned": {k: v for k, v in asdict(settings).items() if k in ("method", "learning_rate", "seed")},
        }
        config = {**model.config.to_dict(), "torch_dtype": dtype_name(dtype), PROVENANCE: told}
        write_json(folder / "config.json", config)

    _put(run, fill, last="config.json")


def _put(run: Path, fill: Callable[[Path], None], *, last: str) -> None:
    """Files made beside their place and moved to the run's top one by one, the one that makes them count last."""
    folder = run / _NEW
    shutil.rmtree(folder, ignore_errors=True)  # a killed run's
    try:
        folder.mkdir()
        fill(folder)
        for path in _in_order(folder.iterdir(), last):
            with path.open("rb") as f:
                os.fsync(f.fileno())
            path.replace(run / path.name)
    except (OSError, RuntimeError) as e:  # the latter is MLX's word for a full disk
        reason = getattr(e, "strerror", None) or e
        raise RunError(f"{run}: the result cannot be written: {reason}; {RunFolder(run).way_on()}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _in_order(paths: Iterable[Path], last: str) -> list[Path]:
    return sorted(paths, key=lambda p: (p.name == last, p.name))


def absolute(settings: Settings) -> Settings:
    """The settings with local paths written out: a run is resumed from any folder."""
    written: dict[str, Any] = {name: str(path.absolute()) for name, path in _local(settings).items()}
    if settings.streams and settings.data is not None and "data" not in written:  # several with weights
        parts = weighted_paths(settings.data)
        written["data"] = ",".join(f"{files.expand(path).absolute()}={weight:g}" for path, weight in parts)
    return replace(settings, **written)


def local_inputs(settings: Settings) -> list[Path]:
    """The files and folders that a run reads."""
    local = _local(settings)
    several = weighted_paths(settings.data) if settings.streams and settings.data and "data" not in local else []
    return [*local.values(), *(path for name, _ in several if (path := files.expand(name)).exists())]


def _local(settings: Settings) -> dict[str, Any]:
    named = {name: getattr(settings, name) for name in ("model", "config", "tokenizer", "data", "valid", "test")}
    paths = {name: files.expand(value) for name, value in named.items() if value is not None}
    return {name: path for name, path in paths.items() if path.exists()}
