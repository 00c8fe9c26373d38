"""Checkpoints with Hugging Face's names: Apple's release, and MLX folders in full precision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from openelm_mlx.config import OpenELMConfig
from openelm_mlx.errors import CheckpointError, ConfigError
from openelm_mlx.files import is_there, read_json
from openelm_mlx.loading import config_of
from openelm_mlx.rawtensor import RawTensor

KIND = "huggingface"


def recognises(names: Iterable[str]) -> bool:
    """Whether the tensors carry this layout's names."""
    return "transformer.token_embeddings.weight" in names


def rename(tensors: Mapping[str, RawTensor]) -> dict[str, RawTensor]:
    """The names are the ones wanted."""
    return dict(tensors)


def read_config(folder: Path, config_file: Path | None, tensors: Mapping[str, RawTensor]) -> OpenELMConfig:
    """``config.json`` beside the weights, or the one given instead."""
    path = config_file or folder / "config.json"
    if not is_there(path, ConfigError):
        raise ConfigError(f"{path}: no such file; weights with Hugging Face's names need their config.json (--config)")
    values = read_json(path, ConfigError)
    quantized = values.get("quantization") or values.get("quantization_config")
    if quantized or any(n.endswith(".scales") for n in tensors):
        raise CheckpointError(
            f"{folder}: is quantized already; the bits it lost are lost, so convert the original checkpoint instead"
        )
    return config_of(values, path)
