"""The fused-backend count: primitives that a decode step dispatches on Metal and CUDA, counted on any machine.

Each primitive that is no view costs a GPU at least one kernel launch, which is what small models pay for. No weights
exist while a model is counted: an array is one zero seen through a view of the real shape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from openelm_mlx.benchmarks.models import PRECISIONS, pack
from openelm_mlx.benchmarks.table import aligned
from openelm_mlx.benchmarks.tracing import Step, primitives
from openelm_mlx.cache import make_cache
from openelm_mlx.config import OpenELMConfig
from openelm_mlx.errors import OpenELMError
from openelm_mlx.model import OpenELM
from openelm_mlx.sampling import Sampler
from openelm_mlx.settings import Sampling

_CONTEXT = 40
"""Tokens in the cache when a step is counted: some, and with room for more."""


@dataclass(frozen=True)
class Dispatches:
    """What one decode step dispatches."""

    by_primitive: dict[str, int]
    """MLX's name of a primitive -> how often; ``Compiled`` is one mx.compile'd kernel, whatever is in it."""
    layer: dict[str, int] = field(default_factory=dict)
    """The same for the last decoder layer alone; empty when a step without layers was counted."""

    @property
    def total(self) -> int:
        """All of a step."""
        return sum(self.by_primitive.values())

    @property
    def per_layer(self) -> int:
        """All of one decoder layer."""
        return sum(self.layer.values())

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "total": self.total,
            "per_layer": self.per_layer,
            "by_primitive": self.by_primitive,
            "layer": self.layer,
        }


@dataclass(frozen=True)
class Comparison:
    """The counts of one size in one precision."""

    model: str
    precision: str
    layers: int
    ours: Dispatches
    mlx_lm: Dispatches | None

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        theirs = self.mlx_lm.to_json() if self.mlx_lm else None
        return {**self.__dict__, "ours": self.ours.to_json(), "mlx_lm": theirs}


def count(step: Step) -> Dispatches:
    """Count one step of any model, without evaluating it; for the rules see :mod:`openelm_mlx.benchmarks.tracing`."""
    return Dispatches(primitives(step))


def count_ours(config: OpenELMConfig, precision: str = "bf16") -> Dispatches:
    """A decode step of this project's model as Metal and CUDA run it, sampling included."""
    model = OpenELM(config)
    _take_no_memory(model, precision)
    choose = Sampler(Sampling(temperature=0.0, seed=0))

    def step(token: mx.array, cache: Sequence[Any]) -> Sequence[mx.array]:
        return choose(model(token[None], cache=cache)[:, -1])[:1]  # as in generation: log-probabilities are left lazy

    return _count_model(model, lambda: make_cache(model), step)


def count_mlx_lm(config: OpenELMConfig, precision: str = "bf16") -> Dispatches:
    """A decode step of mlx-lm's model of the same shape, with mlx-lm's cache and greedy sampling."""
    from mlx_lm.models import cache as caches
    from mlx_lm.models import openelm
    from mlx_lm.sample_utils import make_sampler

    theirs: Any = openelm
    model = theirs.Model(theirs.ModelArgs.from_dict(config.to_dict()))
    _take_no_memory(model, precision)
    sample: Any = make_sampler(temp=0.0)

    def step(token: mx.array, cache: Sequence[Any]) -> Sequence[mx.array]:
        # As generate_step in mlx_lm/generate.py.
        logits = model(token[None], cache=cache)[:, -1, :]
        logprobs = logits - mx.logsumexp(logits, keepdims=True)
        return sample(logprobs), logprobs.squeeze(0)

    return _count_model(model, lambda: list(caches.make_prompt_cache(model)), step)


def compare(
    configs: Iterable[tuple[str, OpenELMConfig]], precisions: Iterable[str], *, mlx_lm: bool = True
) -> list[Comparison]:
    """Counts for several named sizes and precisions; without mlx-lm's when it is not wanted (its import takes long)."""
    wanted = list(precisions)
    return [
        Comparison(
            name,
            precision,
            config.num_transformer_layers,
            count_ours(config, precision),
            count_mlx_lm(config, precision) if mlx_lm else None,
        )
        for name, config in configs
        for precision in wanted
    ]


def lines(comparisons: Sequence[Comparison]) -> list[str]:
    """A table for people, and what one layer is made of."""
    rows = [["model", "precision", "layers", "openelm-mlx", "a layer", "mlx-lm", "a layer"]]
    layers: dict[str, None] = {}  # the sizes differ in how many there are, not in what is in one
    for c in comparisons:
        theirs = [str(c.mlx_lm.total), str(c.mlx_lm.per_layer)] if c.mlx_lm else ["", ""]
        rows.append([c.model, c.precision, str(c.layers), str(c.ours.total), str(c.ours.per_layer), *theirs])
        layers[f"A layer of openelm-mlx, {c.precision}: {_parts(c.ours.layer)}"] = None
        if c.mlx_lm:
            layers[f"A layer of mlx-lm, {c.precision}: {_parts(c.mlx_lm.layer)}"] = None
    title = "Primitives dispatched a decode step (fused-backend count: views left out, sampling included)"
    return [title, *aligned(rows, left=(0, 1)), *layers]


def _parts(counts: dict[str, int]) -> str:
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{n} {name}" for name, n in ordered)


# ---- models without weights ----------------------------------------------------------------------------------------


def _stand_in(x: mx.array) -> mx.array:
    """An evaluated array of the same shape and dtype that takes the memory of one element."""
    view = mx.broadcast_to(mx.zeros((), x.dtype), x.shape)
    mx.eval(view)
    return view


def _take_no_memory(model: nn.Module, precision: str) -> None:
    """Give a new model the dtypes and packed layers of a precision; its weights are never made."""
    if precision not in PRECISIONS:
        raise OpenELMError(f"precision {precision!r} is not known; use one of {', '.join(PRECISIONS)}")
    dtype, bits = PRECISIONS[precision]
    model.set_dtype(dtype)
    _detach_model(model)
    if bits:
        pack(model, bits)
        _detach_model(model)


def _detach_model(model: nn.Module) -> None:
    """Replace every array a model holds, also those made from its weights in a first call."""
    for module in model.modules():
        for name, value in module.items():
            if isinstance(value, mx.array):
                module[name] = _stand_in(value)


def _detach_cache(cache: Iterable[Any]) -> None:
    for layer in cache:
        for name, value in vars(layer).items():
            if isinstance(value, mx.array):
                setattr(layer, name, _stand_in(value))


def _count_model(
    model: Any,
    new_cache: Callable[[], list[Any]],
    step: Callable[[mx.array, Sequence[Any]], Sequence[mx.array]],
) -> Dispatches:
    """Count a step in the middle of a generation, and what the last layer adds to it when it is there twice."""

    def once() -> Counter[str]:
        cache = new_cache()

        def middle() -> Sequence[mx.array]:
            model(mx.zeros((1, _CONTEXT), mx.int32), cache=cache)
            for _ in range(2):  # the second as any later one: whatever a first step alone makes is there by then
                _detach_model(model)
                _detach_cache(cache)
                results = step(_stand_in(mx.zeros((1,), mx.uint32)), cache)
            return results

        return Counter(count(middle).by_primitive)

    whole = once()
    decoder = model.transformer
    decoder.layers = [*decoder.layers, decoder.layers[-1]]
    return Dispatches(dict(whole), dict(once() - whole))
