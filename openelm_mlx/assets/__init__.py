"""What comes with the package: the demonstration model, and the sentences that `openelm demo` tunes it on."""

from __future__ import annotations

from pathlib import Path

from openelm_mlx.errors import OpenELMError

MODEL = Path(__file__).parent / "demo_model"
"""The model's folder, in the layout of a PyTorch checkpoint on the Hugging Face Hub."""

ABOUT = "a tiny OpenELM trained on the addresses of the presidents of the United States"
"""The model, in a few words."""

SENTENCES = Path(__file__).parent / "pie"
"""A folder of training data: sentences that begin as an address does, and end in pie."""

_NEEDED = ("config.json", "model.safetensors", "tokenizer.model")


def demo_model() -> Path:
    """The folder of the model that is used where none is named.

    Raises:
        OpenELMError: files of it are missing; the message says which.
    """
    missing = [name for name in _NEEDED if not (MODEL / name).is_file()]
    if missing:
        raise OpenELMError(
            f"{MODEL}: {', '.join(missing)} of the embedded demonstration model missing, so this installation is "
            "broken: install openelm-mlx again, or name another model"
        )
    return MODEL
