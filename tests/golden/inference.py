"""Logits, loss, caches and greedy continuation of a converted model against a golden file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from openelm_mlx.cache import make_cache
from openelm_mlx.convert.job import convert
from openelm_mlx.loading import load_model
from openelm_mlx.model import OpenELM

LOGITS_TOLERANCE = 3e-5
LOSS_TOLERANCE = 1e-5
CLEAR_MARGIN = 0.02
"""Greedy tokens must agree where the golden's best logit leads by more than this."""

Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Deviation:
    """How far a model is from its golden file."""

    logits: float
    """Largest absolute difference of a logit, whole prompt at once."""
    loss: float
    """Absolute difference of the mean negative log-likelihood."""
    by_token: float
    """Largest absolute difference, prompt fed through the cache token by token."""
    by_chunk: float
    """The same, in chunks of uneven length."""
    greedy_wrong: int
    """Clear greedy steps that differ."""
    greedy_steps: int
    """Clear greedy steps."""

    @property
    def ok(self) -> bool:
        """Within every tolerance."""
        worst = max(self.logits, self.by_token, self.by_chunk)
        return worst <= LOGITS_TOLERANCE and self.loss <= LOSS_TOLERANCE and not self.greedy_wrong

    def __str__(self) -> str:
        return (
            f"logits {self.logits:.1e}, cached {self.by_token:.1e}, chunked {self.by_chunk:.1e}, loss {self.loss:.1e}, "
            f"greedy {self.greedy_steps - self.greedy_wrong}/{self.greedy_steps}"
        )


def measure(source: Path, out: Path, golden: dict[str, Any], npz: Path) -> Deviation:
    """Convert `source` to float32 in `out`, run the golden prompt, and compare."""
    convert(source, out, precision="fp32", tokenizer="none")
    model = load_model(out, dtype="float32")
    ids = golden["prompt"]
    logits = _run(model, [ids])
    distance = _Reference(golden, npz)
    wrong, steps = _greedy(model, golden)
    return Deviation(
        logits=distance(logits),
        loss=abs(_loss(logits, ids) - golden["nll"]),
        by_token=distance(_run(model, [[i] for i in ids], cached=True)),
        by_chunk=distance(_run(model, [ids[:1], ids[1:8], ids[8:]], cached=True)),
        greedy_wrong=wrong,
        greedy_steps=steps,
    )


class _Reference:
    """The golden logits: all of them for tiny cases, the recorded ones otherwise."""

    def __init__(self, golden: dict[str, Any], npz: Path) -> None:
        self._golden = golden
        self._all: Array | None = None
        if npz.is_file():
            with np.load(npz) as arrays:
                (self._all,) = (arrays[key] for key in arrays.files if arrays[key].ndim >= 2)
                self._all = self._all.reshape(-1, self._all.shape[-1])

    def __call__(self, logits: Array) -> float:
        """Largest absolute difference of ``(L, V)`` logits."""
        g = self._golden
        differences = [logits[-1, g["last_top_ids"]] - np.asarray(g["last_top_logits"])]
        differences += [
            logits[position, g["probe_ids"]] - np.asarray(values)
            for position, values in zip(g["probe_positions"], g["probe_logits"], strict=True)
        ]
        last = logits[-1].astype(np.float64)
        differences.append(np.asarray([last.max() + np.log(np.exp(last - last.max()).sum()) - g["logsumexp"]]))
        if self._all is not None:
            differences.append((logits - self._all).ravel())
        return float(max(np.abs(d).max() for d in differences))


def _run(model: OpenELM, chunks: list[list[int]], *, cached: bool = False) -> Array:
    cache = make_cache(model) if cached else None
    parts = []
    for chunk in chunks:
        parts.append(model(mx.array([chunk]), cache=cache)[0])
        mx.eval(parts[-1])
    return np.asarray(mx.concatenate(parts), dtype=np.float32)


def _loss(logits: Array, ids: list[int]) -> float:
    x = logits[:-1].astype(np.float64)
    x -= x.max(-1, keepdims=True)
    logprobs = x - np.log(np.exp(x).sum(-1, keepdims=True))
    return float(-logprobs[np.arange(len(ids) - 1), ids[1:]].mean())


def _greedy(model: OpenELM, golden: dict[str, Any]) -> tuple[int, int]:
    """Teacher-forced: step k sees the prompt and the golden's own first k tokens."""
    tokens, margins, prompt = golden["greedy"], golden["margin"], golden["prompt"]
    logits = _run(model, [prompt, *([t] for t in tokens[:-1])], cached=True)[len(prompt) - 1 :]
    clear = [k for k, margin in enumerate(margins) if margin > CLEAR_MARGIN]
    return sum(int(logits[k].argmax()) != tokens[k] for k in clear), len(clear)
