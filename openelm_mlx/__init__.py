"""Convert and run Apple's OpenELM language models on MLX.

from openelm_mlx import load, generate
model, tokenizer = load("openelm-270m")
print(generate(model, tokenizer, "Once upon a time", max_tokens=50))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from openelm_mlx import device
from openelm_mlx.version import __version__

device.preload()  # the one import-time act; it must come before anything that imports mlx.core

if TYPE_CHECKING:
    from openelm_mlx.config import OpenELMConfig
    from openelm_mlx.errors import OpenELMError
    from openelm_mlx.generation import GenerationResponse, generate, generate_tokens, stream_generate
    from openelm_mlx.loading import load

_EXPORTS = {
    "GenerationResponse": "generation",
    "OpenELMConfig": "config",
    "OpenELMError": "errors",
    "generate": "generation",
    "generate_tokens": "generation",
    "load": "loading",
    "stream_generate": "generation",
}

__all__ = [
    "GenerationResponse",
    "OpenELMConfig",
    "OpenELMError",
    "__version__",
    "generate",
    "generate_tokens",
    "load",
    "stream_generate",
]


def __getattr__(name: str) -> Any:
    # Imported when asked for, so that `openelm --help` and the light verbs do not wait for MLX.
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    try:
        module = import_module(f"{__name__}.{_EXPORTS[name]}")
    except ImportError as e:
        line = device.explain_missing_mlx(e)
        raise ImportError(line) if line else e from None
    value = getattr(module, name)
    globals()[name] = value
    return value
