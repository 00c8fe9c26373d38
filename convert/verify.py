"""Comparing a converted model with its source: the same passage through both."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from openelm_mlx import device
from openelm_mlx.config import OpenELMConfig
from openelm_mlx.convert.sources import Source
from openelm_mlx.errors import OpenELMError
from openelm_mlx.loading import load_model, make_ready
from openelm_mlx.model import OpenELM
from openelm_mlx.sampling import log_softmax
from openelm_mlx.tokenizer import Tokenizer

PASSAGE = Path(__file__).parent / "passage.txt"
MAX_TOKENS = 512
"""Tokens of the passage that are compared."""


@dataclass(frozen=True)
class Verification:
    """Source (float32) against result, over the next-token predictions of the built-in passage."""

    tokens: int
    """Positions compared."""
    max_difference: float
    """Largest absolute difference of a logit."""
    mean_difference: float
    """Mean absolute difference of the logits."""
    mean_kl: float
    """Mean Kullback-Leibler divergence of the result from the source, in nats a token."""
    top1_agreement: float
    """Share of positions whose most likely token is the same."""
    perplexity_before: float
    """Perplexity of the source on the passage."""
    perplexity_after: float
    """Perplexity of the result on the passage."""


def require_memory_to_verify(source: Source) -> None:
    """Refuse a verification whose float32 source will not fit, before anything is converted."""
    needed = sum(t.size for t in source.tensors.values()) * 4
    if memory := device.too_little(needed):
        raise OpenELMError(
            f"--verify runs the source in float32, which needs {needed / 1e9:.2f} GB, and there are "
            f"{memory}; convert without --verify"
        )


def verify(source: Source, folder: Path, tokenizer: Tokenizer | None) -> Verification:
    """Run the passage through the source in float32, then through the converted folder as it will run here."""
    ids = passage_ids(source.config, tokenizer)
    before = _logits(_float32_model(source), ids)
    after = _logits(load_model(folder), ids)
    return compare(before[:, : after.shape[1]], after, ids)


def passage_ids(config: OpenELMConfig, tokenizer: Tokenizer | None) -> list[int]:
    """The passage's ids; without a tokenizer its bytes stand in for them, so that something can be compared."""
    text = PASSAGE.read_text(encoding="utf-8")
    if tokenizer:
        ids = tokenizer.encode(text)
    else:
        ids = [byte % config.vocab_size for byte in text.encode()]
    return ids[: min(MAX_TOKENS, config.max_context_length)]


def compare(before: mx.array, after: mx.array, ids: list[int]) -> Verification:
    """Figures for two ``(L, V)`` float32 logit arrays of the tokens `ids`."""
    difference = mx.abs(before - after)
    p, q = log_softmax(before), log_softmax(after)
    targets = mx.array(ids[1:])[:, None]
    return Verification(
        tokens=len(ids),
        max_difference=float(difference.max()),
        mean_difference=float(difference.mean()),
        mean_kl=float((mx.exp(p) * (p - q)).sum(-1).mean()),
        top1_agreement=float((before.argmax(-1) == after.argmax(-1)).mean()),
        perplexity_before=_perplexity(p, targets),
        perplexity_after=_perplexity(q, targets),
    )


def _perplexity(logprobs: mx.array, targets: mx.array) -> float:
    # MLX's exp, which is infinite where Python's fails.
    return float(mx.exp(-mx.take_along_axis(logprobs[:-1], targets, -1).mean()))


def _float32_model(source: Source) -> OpenELM:
    model = OpenELM(source.config)
    model.load_weights([(name, t.read().astype(mx.float32)) for name, t in source.tensors.items()])
    make_ready(model, mx.float32)
    return model


def _logits(model: OpenELM, ids: list[int]) -> mx.array:
    logits = model(mx.array([ids]))[0].astype(mx.float32)
    mx.eval(logits)
    mx.clear_cache()
    return logits
