"""The model a run begins with, as far as it can be looked at before it is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from openelm_mlx import device, hub
from openelm_mlx.adapters import count_parameters
from openelm_mlx.config import OpenELMConfig
from openelm_mlx.finetune.newmodel import files_of_new, new_config, tokenizer_of
from openelm_mlx.finetune.results import adapter_config
from openelm_mlx.finetune.settings import Settings, SettingsError
from openelm_mlx.loading import config_of, read_model_config
from openelm_mlx.model import OpenELM
from openelm_mlx.tokenizer import Tokenizer

_OF_A_MODEL = (".safetensors", ".bin", ".json", ".model", ".jinja")
"""Weights, config and tokenizer: what a model's logits and a text's tokens depend on."""


@dataclass(frozen=True)
class Base:
    """The model to start from, not yet loaded."""

    folder: Path | None
    """None for a new model."""
    config: OpenELMConfig
    tokenizer: Tokenizer
    dtype: str
    trained: int
    """How many of its parameters, or beside them, will be trained."""


def open_base(settings: Settings) -> Base:
    """The model that the settings name, checked to fit them; its weights are not read.

    Raises:
        OpenELMError: there is none, it has no tokenizer, or cannot be trained so.
    """
    folder = None if settings.init == "random" else _folder(settings)
    if folder is None:
        tokenizer = tokenizer_of(settings)
        config = new_config(settings, tokenizer)
    else:
        config, tokenizer = _of_folder(settings, folder)
    trained = config.parameters
    if settings.method != "full":
        trained = count_parameters(OpenELM(config), adapter_config(settings))  # nothing of it is computed
    dtype = settings.dtype
    if dtype == "auto":
        dtype = "float32" if device.backend() == "cpu" else "bfloat16"
    return Base(folder, config, tokenizer, dtype, trained)


def _folder(settings: Settings) -> Path:
    if settings.model is None:
        raise SettingsError("name a model: --model FOLDER or HUB-NAME")
    return hub.resolve(settings.model, revision=settings.revision)


def _of_folder(settings: Settings, folder: Path) -> tuple[OpenELMConfig, Tokenizer]:
    values = read_model_config(folder)
    config = config_of(values, folder / "config.json")
    if settings.method == "full" and values.get("quantization"):
        raise SettingsError(
            f"{folder}: packed weights cannot be trained; use a bf16 or fp32 model, or --method lora, which leaves "
            "them alone"
        )
    tokenizer = Tokenizer.from_folder(folder)
    if tokenizer is None:
        raise SettingsError(
            f"{folder}: has no tokenizer; convert the model again with --tokenizer FILE, FOLDER or HUB-NAME"
        )
    return config, tokenizer


def model_files(settings: Settings) -> dict[str, Path]:
    """The files that the model to start from depends on, by name: weights, config and tokenizer."""
    if settings.init == "random":
        return files_of_new(settings)
    return files_of_folder(_folder(settings))


def files_of_folder(folder: Path) -> dict[str, Path]:
    """Weights, config and tokenizer of a model folder, by name."""
    return {p.name: p for p in sorted(folder.iterdir()) if p.suffix in _OF_A_MODEL}
