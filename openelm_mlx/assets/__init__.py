"""What comes with the package: a small model to try everything with, and a small task to fine-tune it on."""

from __future__ import annotations

from pathlib import Path

from openelm_mlx.errors import OpenELMError

_HERE = Path(__file__).parent

_NEEDED = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def demo_model() -> Path:
    """The folder of the demonstration model: an unconverted checkpoint in Hugging Face's layout.

    Raises:
        OpenELMError: a file of it is missing.
    """
    folder = _HERE / "demo_model"
    for name in _NEEDED:
        if not (folder / name).is_file():
            raise OpenELMError(
                f"{folder / name}: this file of the demonstration model is missing; "
                "install openelm-mlx again, or name a model with --model"
            )
    return folder


def demo_task() -> Path:
    """Prompts and completions in JSON Lines that change what the demonstration model writes within a minute.

    Raises:
        OpenELMError: the file is missing.
    """
    file = _HERE / "demo_task.jsonl"
    if not file.is_file():
        raise OpenELMError(f"{file}: this file of the demonstration is missing; install openelm-mlx again")
    return file
