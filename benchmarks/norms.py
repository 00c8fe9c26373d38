"""``openelm bench norms``: what RMSNorm costs as separate operations, and as one.

The OpenELM paper (arXiv 2404.14619, where it analyses its benchmark results) finds its model slower than OLMo's of the
same size, and blames a naive RMSNorm, many small kernels each, and the number of norm layers: 113 in the 1.1B, those of
queries and keys included, against 33. Here the naive one runs beside MLX's, alone and in the whole model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from openelm_mlx import device
from openelm_mlx.benchmarks.models import Subject, load_subject
from openelm_mlx.benchmarks.peers.onmlx import measure as timed_run
from openelm_mlx.benchmarks.peers.ours import pieces
from openelm_mlx.benchmarks.protocol import PROTOCOLS, Protocol, Spread, prompt_ids
from openelm_mlx.benchmarks.table import aligned
from openelm_mlx.config import OpenELMConfig
from openelm_mlx.model import OpenELM

PROTOCOL = PROTOCOLS["quick"]

_CALLS = 64
"""Calls in one evaluation, each waiting for the one before, as they do in a model."""


@dataclass(frozen=True)
class NormTime:
    """One call of RMSNorm on the input a decode step has."""

    rows: int
    """1 in the residual stream; the number of heads for queries and keys, which are normalized in one call."""
    width: int
    naive_us: Spread
    """Microseconds a call."""
    fast_us: Spread

    @property
    def ratio(self) -> float:
        """How many times as long the naive one takes."""
        return (self.naive_us / self.fast_us).median


@dataclass(frozen=True)
class NormReport:
    """The naive RMSNorm beside MLX's, alone and in a model."""

    model: str
    precision: str
    backend: str
    norm_layers: int
    times: tuple[NormTime, ...]
    naive_tps: Spread
    """Tokens generated a second with naive norms."""
    own_tps: Spread
    """The same with the norms the model is loaded with."""

    @property
    def speedup(self) -> float:
        """Median of the runs' ratios."""
        return (self.own_tps / self.naive_tps).median

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        times = [{**asdict(t), "ratio": t.ratio} for t in self.times]
        return {**asdict(self), "times": times, "speedup": self.speedup}


def naive_rms_norm(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    """RMSNorm operation by operation: in float32, cast back, then scaled, as CoreNet's ``rms_norm.py`` writes it."""
    wide = x.astype(mx.float32)
    normed = (wide * mx.rsqrt(mx.square(wide).mean(-1, keepdims=True) + eps)).astype(x.dtype)
    return normed if weight is None else normed * weight


class NaiveRMSNorm(nn.Module):
    """A norm layer that computes :func:`naive_rms_norm`."""

    def __init__(self, weight: mx.array, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def __call__(self, x: mx.array) -> mx.array:
        return naive_rms_norm(x, self.weight, self.eps)


class NaivePrepare:
    """What an attention layer does to queries and keys first: :func:`naive_rms_norm`, then the layer's own RoPE."""

    def __init__(self, attention: Any, eps: float) -> None:
        heads = [(attention.num_heads, attention.q_norm.weight), (attention.num_kv_heads, attention.k_norm.weight)]
        self._weight = mx.concatenate([mx.broadcast_to(weight, (n, 1, weight.size)) for n, weight in heads])
        self._eps = eps
        self._rotate = partial(type(attention).prepare, attention)  # while normalize_qk is off
        mx.eval(self._weight)

    def __call__(self, qk: mx.array, offset: int | mx.array) -> mx.array:
        """Normalize and rotate ``(B, H + H_kv, L, head_dim)``."""
        return self._rotate(naive_rms_norm(qk, self._weight, self._eps), offset)


@contextmanager
def naive_norms(model: OpenELM) -> Iterator[None]:
    """Let a model use the naive RMSNorm, with its own weights, while the block runs."""
    eps = model.config.rms_norm_eps
    places = [(layer, name) for layer in model.layers for name in ("attn_norm", "ffn_norm")]
    own = [(parent, name, parent[name]) for parent, name in [*places, (model.transformer, "norm")]]
    heads: list[Any] = [layer.attn for layer in model.layers if model.config.normalize_qk_projections]
    try:
        for parent, name, norm in own:
            parent[name] = NaiveRMSNorm(norm.weight, eps)
        for attention in heads:
            attention.normalize_qk = False
            attention.prepare = NaivePrepare(attention, eps)  # hides the method of this name
        yield
    finally:
        for parent, name, norm in own:
            parent[name] = norm
        for attention in heads:
            attention.normalize_qk = True
            attention.__dict__.pop("prepare", None)


def norm_layers(config: OpenELMConfig) -> int:
    """Norm layers of a model, those of queries and keys included."""
    return (4 if config.normalize_qk_projections else 2) * config.num_transformer_layers + 1


def measure(
    subject: Subject, protocol: Protocol = PROTOCOL, *, cpu_weights: str | None = None, dtype: str | None = None
) -> NormReport:
    """Time both norms, alone and in the model, in alternating runs.

    Raises:
        OpenELMError: the model cannot be loaded.
    """
    model = load_subject(subject, cpu_weights=cpu_weights, dtype=dtype)
    config = model.config
    shapes = [(1, config.model_dim)]
    if config.normalize_qk_projections:
        heads = [sum(pair) for pair in zip(config.num_query_heads, config.num_kv_heads, strict=True)]
        shapes.append((max(heads), config.head_dim))
    compute = model.transformer.norm.weight.dtype
    times = tuple(_time_norms(rows, width, compute, config.rms_norm_eps, protocol.repeats) for rows, width in shapes)

    def naive() -> float:
        with naive_norms(model):
            return _tokens_per_second(model, protocol)

    naive_tps, own_tps = _alternate(naive, lambda: _tokens_per_second(model, protocol), protocol.repeats)
    return NormReport(
        model=subject.name,
        precision=subject.precision,
        backend=device.backend(),
        norm_layers=norm_layers(config),
        times=times,
        naive_tps=naive_tps,
        own_tps=own_tps,
    )


def lines(report: NormReport) -> list[str]:
    """A table for people."""
    r = report
    calls = [["one call", "naive us", "mx.fast.rms_norm us", "naive takes"]]
    for t in r.times:
        medians = [f"{spread.median:.1f}" for spread in (t.naive_us, t.fast_us)]
        calls.append([f"{t.rows} x {t.width}", *medians, f"{t.ratio:.2f}x"])
    runs = [["whole model", "tokens/s", "least", "most"]]
    for name, s in (("naive norms", r.naive_tps), ("its own norms", r.own_tps)):
        runs.append([name, *(f"{value:.2f}" for value in (s.median, s.least, s.most))])
    text = [
        f"{r.model} ({r.precision}), {r.norm_layers} norm layers, on {r.backend}",
        *aligned(calls, left=(0,)),
        *aligned(runs, left=(0,)),
        f"Its own norms make it {r.speedup:.2f} times as fast",
    ]
    if r.backend == "cpu":
        text.append("A CPU has no fused RMSNorm: mx.fast.rms_norm is separate operations there too")
    return text


def _time_norms(rows: int, width: int, dtype: mx.Dtype, eps: float, repeats: int) -> NormTime:
    weight = mx.ones((width,), dtype)
    x = mx.random.normal((1, rows, 1, width)).astype(dtype)
    mx.eval(weight, x)

    def microseconds(norm: Callable[[mx.array, mx.array, float], mx.array]) -> float:
        y = x
        for _ in range(_CALLS):
            y = norm(y, weight, eps)
        start = time.perf_counter()
        mx.eval(y)
        return (time.perf_counter() - start) / _CALLS * 1e6

    naive, fast = _alternate(
        lambda: microseconds(naive_rms_norm), lambda: microseconds(mx.fast.rms_norm), max(repeats, 5)
    )
    return NormTime(rows, width, naive, fast)


def _alternate(first: Callable[[], float], second: Callable[[], float], repeats: int) -> tuple[Spread, Spread]:
    """Run two measurements in turn, after a run of each that does not count."""
    pairs = [(first(), second()) for _ in range(repeats + 1)][1:]
    return Spread.of([a for a, _ in pairs]), Spread.of([b for _, b in pairs])


def _tokens_per_second(model: OpenELM, protocol: Protocol) -> float:
    ids = prompt_ids(protocol.prompt_tokens, model.config.vocab_size)
    run = timed_run(pieces(model, ids, protocol.gen_tokens), len(ids), protocol.gen_tokens, protocol.time_limit)
    return run.timing.generation_tps
