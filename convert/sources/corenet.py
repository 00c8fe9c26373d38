"""CoreNet's checkpoints: Hugging Face's names without ``transformer.``, and a YAML that names the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from openelm_mlx.config import PRESETS, OpenELMConfig
from openelm_mlx.errors import CheckpointError, ConfigError
from openelm_mlx.loading import parameter_shapes
from openelm_mlx.model import OpenELM
from openelm_mlx.rawtensor import RawTensor

KIND = "corenet"

VOCABULARIES = (32000, 32128)
"""Rows of the released embedding tables: the Llama vocabulary, and with the padding CoreNet trained with."""

_SECTION = ("model", "language_modeling", "general_gpt")
_MAX_YAML_BYTES = 1_000_000


def recognises(names: Iterable[str]) -> bool:
    """Whether the tensors carry this layout's names."""
    return "token_embeddings.weight" in names


def rename(tensors: Mapping[str, RawTensor]) -> dict[str, RawTensor]:
    """CoreNet's names -> Hugging Face's."""
    return {_rename(name): tensor for name, tensor in tensors.items()}


def _rename(name: str) -> str:
    return name.replace("classifier.", "lm_head.", 1) if name.startswith("classifier.") else f"transformer.{name}"


def read_config(folder: Path, config_file: Path | None, tensors: Mapping[str, RawTensor]) -> OpenELMConfig:
    """From the YAML given, the only one in the folder, or, without one, the preset that the shapes match."""
    beside = sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")])
    path = config_file or (beside[0] if len(beside) == 1 else None)
    if path is None:
        return config_from_shapes(folder, tensors)
    return config_from_yaml(path)


def config_from_yaml(path: Path) -> OpenELMConfig:
    """The ``model.language_modeling.general_gpt`` section of a CoreNet config; other keys of it override the preset.

    Raises:
        ConfigError: the file is no YAML, has no such section, or names a model that is not known.
    """
    section = _section(path)
    name = section.get("model_name")
    known = {k: tuple(v) if isinstance(v, list) else v for k, v in section.items() if k in _fields() and v is not None}
    if isinstance(name, str) and name in PRESETS:
        return OpenELMConfig.preset(name, **known)
    if "model_dim" not in known:
        raise ConfigError(f"{path}: model_name is {name!r}; known are {', '.join(PRESETS)}")
    try:
        return OpenELMConfig.from_dict(known)
    except ConfigError as e:
        raise ConfigError(f"{path}: {e}") from None


def _section(path: Path) -> dict[str, Any]:
    import yaml

    try:
        if path.stat().st_size > _MAX_YAML_BYTES:
            raise ConfigError(f"{path}: too large for a config")
        values: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as e:
        raise ConfigError(f"{path}: not readable as YAML: {e}") from None
    if isinstance(values, dict) and "model_dim" in values:
        return values  # a Hugging Face config.json is YAML too
    for key in _SECTION:
        values = values.get(key) if isinstance(values, dict) else None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: has no section {'.'.join(_SECTION)}")
    return values


def _fields() -> set[str]:
    from dataclasses import fields

    return {f.name for f in fields(OpenELMConfig)}


def config_from_shapes(folder: Path, tensors: Mapping[str, RawTensor]) -> OpenELMConfig:
    """The released size whose tensors these are.

    Raises:
        CheckpointError: no preset has these shapes.
    """
    found = {name: tensor.shape for name, tensor in tensors.items()}
    for name in PRESETS:
        for vocab_size in VOCABULARIES:
            config = OpenELMConfig.preset(name, vocab_size=vocab_size)
            if parameter_shapes(OpenELM(config)) == found:
                return config
    rows = found["transformer.token_embeddings.weight"]
    raise CheckpointError(
        f"{folder}: the checkpoint's shapes match none of {', '.join(PRESETS)} (embedding {rows}, {len(found)} "
        "tensors); give its CoreNet YAML with --config"
    )
