"""CoreNet's checkpoints: Hugging Face's names without ``transformer.``, and a YAML that names the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from openelm_mlx import files
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
    if config_file:
        return config_from_yaml(config_file)
    beside = sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")])
    if len(beside) == 1:
        return config_from_yaml(beside[0])
    if config := config_from_shapes(tensors):
        return config
    rows = tensors["transformer.token_embeddings.weight"].shape
    several = f"; of the YAML files here ({', '.join(p.name for p in beside)}) name the right one" if beside else ""
    raise CheckpointError(
        f"{folder}: the checkpoint's shapes match none of {', '.join(PRESETS)} (embedding {rows}, {len(tensors)} "
        f"tensors); give its CoreNet YAML with --config{several}"
    )


def config_from_yaml(path: Path) -> OpenELMConfig:
    """The ``model.language_modeling.general_gpt`` section of a CoreNet config; other keys of it override the preset.

    A Hugging Face config.json is taken too: it is YAML, and has the same keys at its top.

    Raises:
        ConfigError: the file is no YAML, has no such section, or names a model that is not known.
    """
    section = _section(path)
    name = section.get("model_name")
    known = {k: tuple(v) if isinstance(v, list) else v for k, v in section.items() if k in _fields() and v is not None}
    try:
        if isinstance(name, str) and name in PRESETS:
            return OpenELMConfig.preset(name, **known)
        if "model_dim" not in known:
            shown = repr(name) if isinstance(name, str) else "missing" if name is None else f"a {type(name).__name__}"
            raise ConfigError(f"model_name is {shown}; known are {', '.join(PRESETS)}")
        return OpenELMConfig.from_dict(known)
    except ConfigError as e:
        raise ConfigError(f"{path}: {e}") from None


def _section(path: Path) -> dict[str, Any]:
    values = _read_yaml(path)
    if isinstance(values, dict) and "model_dim" in values:
        return values
    for key in _SECTION:
        values = values.get(key) if isinstance(values, dict) else None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: has no section {'.'.join(_SECTION)}, so it is no CoreNet config of an OpenELM")
    return values


def _read_yaml(path: Path) -> Any:
    import yaml

    data = files.read(path, ConfigError, _MAX_YAML_BYTES)
    try:
        return yaml.safe_load(data.decode("utf-8"))
    except Exception as e:  # besides YAMLError, whatever PyYAML's constructors raise
        raise ConfigError(f"{path}: not readable as YAML: {' '.join(str(e).split())}") from None


def _fields() -> set[str]:
    from dataclasses import fields

    return {f.name for f in fields(OpenELMConfig)}


def config_from_shapes(tensors: Mapping[str, RawTensor]) -> OpenELMConfig | None:
    """The released size whose tensors these are; None if they are none's."""
    found = {name: tensor.shape for name, tensor in tensors.items()}
    for name in PRESETS:
        for vocab_size in VOCABULARIES:
            config = OpenELMConfig.preset(name, vocab_size=vocab_size)
            if parameter_shapes(OpenELM(config)) == found:
                return config
    return None
