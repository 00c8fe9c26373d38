"""How much memory a run takes at least, from sizes alone: one that will not fit is refused before it starts."""

from __future__ import annotations

from dataclasses import dataclass

from openelm_mlx import device
from openelm_mlx.config import OpenELMConfig
from openelm_mlx.finetune.losses import LOGITS
from openelm_mlx.finetune.settings import Settings
from openelm_mlx.loading import TooLargeError

_RESIDUAL, _ATTENTION, _FEED_FORWARD = 6, 4, 4
"""Arrays that a layer keeps for the backward pass, of the width of the residual stream, of its queries, keys and
values, and of its feed-forward network. Counted from the layer's operations."""

_LOGITS = 5
"""Arrays of a piece's logits, and of that shape, that there are at once."""

_SCORES_ON_A_GPU = 3
"""Arrays of attention scores that MLX keeps there; on a CPU there are none (`openelm_mlx.cpu.backprop`)."""


@dataclass(frozen=True)
class Estimate:
    """Bytes by what they are for."""

    weights: int
    trained: int
    """Gradients and AdamW's moments of the trained parameters, and their exact copies."""
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.trained + self.activations + self.logits

    def __str__(self) -> str:
        parts = {
            "weights": self.weights,
            "gradients and optimizer": self.trained,
            "activations": self.activations,
            "logits": self.logits,
        }
        return ", ".join(f"{name} {n / 1e9:.2f} GB" for name, n in parts.items())


def estimate(
    config: OpenELMConfig, settings: Settings, *, weight_bytes: int, trained: int, item: int, length: int
) -> Estimate:
    """Least memory of a run.

    Args:
        config: the model.
        settings: of the run.
        weight_bytes: of the loaded model, adapters included.
        trained: number of trained parameters.
        item: bytes of a number in the dtype computed in.
        length: of the longest row.
    """
    full = settings.method == "full"
    own = 4 if item < 4 and full else 0
    gradients = item if full and settings.accumulation == 1 else 4
    embedding = 2 * config.vocab_size * config.model_dim * 4 if full else 0  # its gradients are added up of parts
    return Estimate(
        weights=weight_bytes,
        trained=trained * (gradients + 8 + own) + embedding,
        activations=_activations(config, settings, item, length),
        logits=_LOGITS * min(LOGITS, settings.batch_size * length * config.vocab_size) * 4,
    )


def _activations(config: OpenELMConfig, settings: Settings, item: int, length: int) -> int:
    tokens = settings.batch_size * length
    layers = [_layer(config, layer, tokens, length) * item for layer in range(config.num_transformer_layers)]
    kept = (
        len(layers) * tokens * config.model_dim * item + max(layers) if settings.gradient_checkpointing else sum(layers)
    )
    return kept + max(layers)  # of the gradients of one


def _layer(config: OpenELMConfig, layer: int, tokens: int, length: int) -> int:
    heads, kv_heads = config.num_query_heads[layer], config.num_kv_heads[layer]
    inside = (heads + 2 * kv_heads) * config.head_dim
    scores = _SCORES_ON_A_GPU * heads * length if device.backend() != "cpu" else 0
    wide = config.ffn_dims[layer]
    return tokens * (_RESIDUAL * config.model_dim + _ATTENTION * inside + _FEED_FORWARD * wide + scores)


def require(needed: Estimate, settings: Settings) -> None:
    """Refuse a run that will not fit.

    Raises:
        TooLargeError: with the figures, and what of the settings would make it smaller.
    """
    memory = device.too_little(needed.total)
    if memory is None:
        return
    ways = ["a smaller --batch-size (with --accumulation the updates stay the same)", "a smaller --max-length"]
    if not settings.gradient_checkpointing:
        ways.append("--gradient-checkpointing")
    if settings.method == "full" and settings.init == "model":
        ways.append("--method lora")
    raise TooLargeError(
        f"{settings.subject}: fine-tuning so needs {needed.total / 1e9:.2f} GB ({needed}), and there are "
        f"{memory}; use {', '.join(ways)}; --force tries all the same"
    )
