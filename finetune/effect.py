"""How far a fused model is from its base with the adapter, beside how far the adapter moves the base."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from openelm_mlx import device
from openelm_mlx.adapters import Adapter, attach_adapter
from openelm_mlx.loading import load_model, memory_needed
from openelm_mlx.model import OpenELM
from openelm_mlx.tokenizer import Tokenizer

_PASSAGE = (
    "The ferry leaves the island at seven in the morning and takes forty minutes to cross the strait. On Sundays it "
    "carries mostly walkers, who have read in the guide that the lighthouse at the northern end was built in 1874 by a "
    'keeper\'s daughter with her own money. "She never told anyone what it had cost," the captain says, and slows down '
    "so that everybody can take a picture. Question: how long does the crossing take? Answer: forty minutes."
)
MAX_TOKENS = 128
"""Tokens of the passage that are compared."""


@dataclass(frozen=True)
class Effect:
    """Absolute differences of logits over the passage, computed in float32."""

    tokens: int
    """Positions compared."""
    max_difference: float
    """Largest, of the fused model from the base with the adapter."""
    mean_difference: float
    """Mean of the same."""
    mean_effect: float
    """Mean, of the base with the adapter from the base without."""


def not_enough_memory(base: Path, adapter: Path, fused: Path) -> str | None:
    """Why the models cannot be compared here; None when they can."""
    needed = max(memory_needed(base, _dtype(), adapter=adapter), memory_needed(fused, _dtype()))
    memory = device.too_little(needed)
    return f"that needs {needed / 1e9:.2f} GB, and there are {memory}" if memory else None


def measure(base: Path, adapter: Adapter, where: Path, fused: Path, tokenizer: Tokenizer | None) -> Effect:
    """Run the passage through a base, the base with the adapter, and the fused model; one is loaded at a time."""
    model = load_model(base, dtype=_dtype())
    ids = _passage(model, tokenizer)
    plain = _logits(model, ids)
    attach_adapter(model, adapter, where)
    with_adapter = _logits(model, ids)
    del model
    difference = mx.abs(_logits(load_model(fused, dtype=_dtype()), ids) - with_adapter)
    return Effect(
        tokens=len(ids),
        max_difference=float(difference.max()),
        mean_difference=float(difference.mean()),
        mean_effect=float(mx.abs(with_adapter - plain).mean()),
    )


def _dtype() -> str | None:
    # A CPU computes in float32 as it is, and then keeps bfloat16 matrices: half the memory, the same products.
    return None if device.backend() == "cpu" else "float32"


def _passage(model: OpenELM, tokenizer: Tokenizer | None) -> list[int]:
    """The passage's ids; without a tokenizer its bytes stand in for them."""
    vocab, window = model.config.vocab_size, model.config.max_context_length
    ids = tokenizer.encode(_PASSAGE) if tokenizer else [byte % vocab for byte in _PASSAGE.encode()]
    return ids[: min(MAX_TOKENS, window)]


def _logits(model: OpenELM, ids: list[int]) -> mx.array:
    logits = model(mx.array([ids]))[0].astype(mx.float32)
    mx.eval(logits)
    mx.clear_cache()
    return logits
