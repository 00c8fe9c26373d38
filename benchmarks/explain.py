"""``openelm bench --explain``: what one decode step spends its time on.

A step is run once with its products, norms, RoPE, attention and SwiGLU watched, whatever layers the model is made of,
and their calls are run again by kind, on the same inputs. What no kind accounts for is `other`: the embedding, sums,
and on a GPU the waiting between kernels.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from openelm_mlx import device
from openelm_mlx import model as decoder
from openelm_mlx.benchmarks.protocol import PROTOCOLS
from openelm_mlx.cache import make_cache
from openelm_mlx.cpu import ops
from openelm_mlx.errors import OpenELMError
from openelm_mlx.generation import generate_tokens
from openelm_mlx.model import OpenELM
from openelm_mlx.sampling import Sampler
from openelm_mlx.settings import Sampling

CONTEXT = PROTOCOLS["paper"].prompt_tokens + PROTOCOLS["paper"].gen_tokens // 2
"""Tokens in the cache: the middle of the paper's protocol."""

REPEATS = 5

PRODUCTS, NORMS, ROPE, ATTENTION, SWIGLU = "matrix products", "norms", "RoPE", "attention", "SwiGLU"
NORMS_AND_ROPE = "q/k norms + RoPE"
CACHE, SAMPLING, BUILDING, OTHER = "cache update", "sampling", "graph building", "other"

_MODULES = {
    "qkv_proj": PRODUCTS,
    "out_proj": PRODUCTS,
    "proj_1": PRODUCTS,
    "proj_2": PRODUCTS,
    "lm_head": PRODUCTS,
    "attn_norm": NORMS,
    "ffn_norm": NORMS,
    "norm": NORMS,
}
"""The layers that are watched, by the names checkpoints give them, which stay when a CPU's layers are swapped in."""

_FUNCTIONS: tuple[tuple[Any, str, str], ...] = (
    (OpenELM, "head", PRODUCTS),
    (mx, "addmm", PRODUCTS),
    (mx, "matmul", PRODUCTS),
    (mx, "quantized_matmul", PRODUCTS),
    (mx.fast, "rms_norm", NORMS),
    (decoder, "scale_heads", NORMS),
    (mx.fast, "rope", ROPE),
    (ops, "rotate", ROPE),
    (ops, "normalize_and_rotate", NORMS_AND_ROPE),
)
"""Functions that are watched: their place, name and kind."""

_METHODS = (
    ("attn", "attend", ATTENTION),
    ("ffn", "activate", SWIGLU),
)
"""Methods of a decoder layer's parts that are watched: the part, their name and kind."""

_ENOUGH_S = 0.02
_MOST_TIMES = 16
"""Short parts are run several times in one evaluation, whose own latency would count for too much otherwise."""

_GENERATED = 9


@dataclass(frozen=True)
class Part:
    """One kind of work in a decode step."""

    name: str
    ms: float
    """Median milliseconds a step."""
    percent: float
    """Of the whole step."""
    calls: int | None = None
    """Calls a step, where they are counted."""


@dataclass(frozen=True)
class Explanation:
    """A decode step and its parts, which add up to it."""

    backend: str
    context: int
    repeats: int
    step_ms: float
    """Median milliseconds of a step that is first built and then computed."""
    generation_ms: float
    """Median milliseconds a token in generation, where the next step is built while this one is computed."""
    parts: tuple[Part, ...]
    """The last one is `other`: the step less the rest. It is below 0 when parts take longer alone than together."""

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {**asdict(self), "parts": [asdict(part) for part in self.parts]}


def explain(model: OpenELM, *, context: int | None = None, repeats: int = REPEATS) -> Explanation:
    """Measure one decode step of a loaded model, part by part, in alternating rounds.

    Args:
        model: ready to run, as :func:`openelm_mlx.load` returns it.
        context: tokens in the cache; by default :data:`CONTEXT`, or half the window where that is less.
        repeats: rounds; each figure is the median of as many.

    Raises:
        OpenELMError: the context leaves no room in the window, or there is no round.
    """
    window = model.config.max_context_length
    if context is None:
        context = min(CONTEXT, window // 2)
    if not 1 <= context <= window - _GENERATED:
        raise OpenELMError(f"context must be from 1 to {window - _GENERATED} for a window of {window}, not {context}")
    if repeats < 1:
        raise OpenELMError(f"repeats must be 1 or more, not {repeats}")
    step = _Step(model, context)
    calls = step.watched()
    parts = {kind: _in_one_evaluation(partial(_again, calls[kind])) for kind in calls if calls[kind]}
    parts[CACHE] = _in_one_evaluation(_CacheUpdate(model, context))
    parts[SAMPLING] = _in_one_evaluation(step.sampling())
    generating = _Generation(model, context)
    seconds: dict[str, list[float]] = defaultdict(list)
    for _ in range(repeats):
        building, whole = step.seconds()
        seconds[BUILDING].append(building)
        seconds["step"].append(whole)
        seconds["generation"].append(generating())
        for name, part in parts.items():
            seconds[name].append(part())
    ms = {name: statistics.median(values) * 1000 for name, values in seconds.items()}
    whole_ms, generation_ms = ms.pop("step"), ms.pop("generation")
    ms[OTHER] = whole_ms - sum(ms.values())
    ordered = [*parts, BUILDING, OTHER]
    return Explanation(
        backend=device.backend(),
        context=context,
        repeats=repeats,
        step_ms=whole_ms,
        generation_ms=generation_ms,
        parts=tuple(
            Part(name, ms[name], 100 * ms[name] / whole_ms, len(calls[name]) if name in calls else None)
            for name in ordered
        ),
    )


def lines(explanation: Explanation) -> list[str]:
    """A table for people."""
    e = explanation
    text = [f"One decode step at {e.context} tokens of context, on {e.backend}: {e.step_ms:.3f} ms"]
    for part in e.parts:
        calls = f"{part.calls:5} calls" if part.calls is not None else ""
        text.append(f"  {part.name:16} {part.ms:9.3f} ms {part.percent:6.1f} % {calls}".rstrip())
    text.append(
        f"In generation, where the next step is built meanwhile: {e.generation_ms:.3f} ms a token "
        f"({1000 / e.generation_ms:.1f} tokens/s)"
    )
    return text


# ---- what is timed -------------------------------------------------------------------------------------------------


def _filled_cache(model: OpenELM, context: int) -> list[Any]:
    """Caches that hold `context` tokens; which ones makes no difference to the time."""
    cache = make_cache(model)
    for layer, heads in zip(cache, model.config.num_kv_heads, strict=True):
        layer.update_and_fetch(*_random_keys(model, heads, context))
        mx.eval(layer.state)
    return cache


def _random_keys(model: OpenELM, heads: int, length: int) -> tuple[mx.array, mx.array]:
    keys = mx.random.normal((1, heads, length, model.config.head_dim)).astype(model.transformer.norm.weight.dtype)
    mx.eval(keys)
    return keys, keys


class _Step:
    """A whole decode step, always at the same place."""

    def __init__(self, model: OpenELM, context: int) -> None:
        self._model = model
        self._context = context
        self._cache = _filled_cache(model, context)
        self._choose = Sampler(Sampling(temperature=0.0, seed=0))
        self._token = mx.array([min(3, model.config.vocab_size - 1)], mx.uint32)
        for _ in range(2):  # compiles what is compiled
            self.seconds()

    def _build(self, cache: Sequence[Any]) -> tuple[mx.array, mx.array]:
        return self._choose(self._model(self._token[None], cache=cache)[:, -1])

    def seconds(self) -> tuple[float, float]:
        """Time to build the graph, and to build and compute it."""
        start = time.perf_counter()
        results = self._build(self._cache)
        built = time.perf_counter()
        mx.eval(results)
        end = time.perf_counter()
        for layer in self._cache:
            layer.trim(1)
        return built - start, end - start

    def watched(self) -> dict[str, list[_Call]]:
        """The watched calls of one step, by kind."""
        # On other caches: the calls keep views of them, and arrays that are viewed are copied when they are updated.
        cache = _filled_cache(self._model, self._context)
        with _watch(self._model) as calls:
            mx.eval(self._build(cache))
        return calls

    def sampling(self) -> Callable[[], list[mx.array]]:
        """Builds the choice of a token."""
        logits = mx.random.normal((1, self._model.config.vocab_size)).astype(self._model.transformer.norm.weight.dtype)
        mx.eval(logits)
        return lambda: list(self._choose(logits))


class _CacheUpdate:
    """Builds the update of all layers' caches by one token."""

    def __init__(self, model: OpenELM, context: int) -> None:
        self._cache = _filled_cache(model, context)
        self._keys = [_random_keys(model, heads, 1) for heads in model.config.num_kv_heads]

    def __call__(self) -> list[mx.array]:
        for layer, (keys, values) in zip(self._cache, self._keys, strict=True):
            layer.update_and_fetch(keys, values)
            layer.trim(1)
        return [array for layer in self._cache for array in layer.state if isinstance(array, mx.array)]


class _Generation:
    """Generates some tokens, always at the same place; gives seconds a token."""

    def __init__(self, model: OpenELM, context: int) -> None:
        self._model = model
        self._cache = _filled_cache(model, context)

    def __call__(self) -> float:
        tokens = generate_tokens(self._model, [0], _GENERATED, eos_token_ids=(), cache=self._cache)
        next(tokens)
        start = time.perf_counter()
        rest = sum(1 for _ in tokens)
        end = time.perf_counter()
        for layer in self._cache:
            layer.trim(_GENERATED)
        return (end - start) / rest


def _in_one_evaluation(build: Callable[[], list[mx.array]]) -> Callable[[], float]:
    """A function that gives the seconds a part takes, once its graph is built by `build`."""

    def run(times: int) -> float:
        results = [array for _ in range(times) for array in build()]
        start = time.perf_counter()
        mx.eval(results)
        return (time.perf_counter() - start) / times

    run(1)
    times = min(_MOST_TIMES, 1 + int(_ENOUGH_S / max(run(1), 1e-6)))
    return partial(run, times)


# ---- watching ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """A call that was seen, with its inputs computed."""

    function: Callable[..., mx.array]
    inputs: tuple[Any, ...]
    named: dict[str, Any]


def _again(calls: Sequence[_Call]) -> list[mx.array]:
    """Build the calls again, each waiting for the one before where shapes allow, as in the model."""
    results: list[mx.array] = []
    previous: mx.array | None = None
    for call in calls:
        inputs = [_after(x, previous) if i == 0 and isinstance(x, mx.array) else x for i, x in enumerate(call.inputs)]
        previous = call.function(*inputs, **call.named)
        results.append(previous)
    return results


def _after(x: mx.array, previous: mx.array | None) -> mx.array:
    """An array like `x` that is part of `previous`, so that what reads it has to wait; or `x`. Copies nothing."""
    if previous is None or previous.size < x.size or previous.dtype != x.dtype:
        return x
    return previous.reshape(-1)[: x.size].reshape(x.shape)


@contextmanager
def _watch(model: OpenELM) -> Iterator[dict[str, list[_Call]]]:
    """Note the calls of watched layers and functions while the block runs."""
    kinds = (PRODUCTS, NORMS, ROPE, NORMS_AND_ROPE, ATTENTION, SWIGLU)
    calls: dict[str, list[_Call]] = {kind: [] for kind in kinds}
    inside = [False]
    modules = {id(m): kind for path, m in model.named_modules() if (kind := _MODULES.get(path.split(".")[-1]))}

    def note(original: Callable[..., Any], kind_of: Callable[[tuple[Any, ...]], str | None]) -> Callable[..., Any]:
        def function(*inputs: Any, **named: Any) -> Any:
            kind = kind_of(inputs)
            if kind is None or inside[0]:
                return original(*inputs, **named)
            inside[0] = True
            try:
                result = original(*inputs, **named)
                if all(result is not x for x in inputs) and _computed((*inputs, *named.values())):
                    owner = () if isinstance(inputs[0], mx.array) else inputs[:1]
                    calls[kind].append(_Call(partial(original, *owner), inputs[len(owner) :], named))
                return result
            finally:
                inside[0] = False

        return function

    def replace() -> Iterator[tuple[Any, str, Any]]:
        methods = {(type(layer[part]), name, kind) for layer in model.layers for part, name, kind in _METHODS}
        for place, name, kind in (*_FUNCTIONS, *methods):
            yield place, name, lambda _, kind=kind: kind
        for layer in {type(m) for _, m in model.named_modules() if id(m) in modules}:
            yield layer, "__call__", lambda inputs: modules.get(id(inputs[0]))

    originals = [(place, name, getattr(place, name)) for place, name, _ in replace()]
    try:
        for place, name, kind_of in replace():
            setattr(place, name, note(getattr(place, name), kind_of))
        yield calls
    finally:
        for place, name, original in originals:
            setattr(place, name, original)


def _computed(values: Sequence[Any]) -> bool:
    """Compute arrays; False inside a function that is being compiled, where arrays have no values."""
    try:
        mx.eval([v for v in values if isinstance(v, mx.array)])
    except ValueError:
        return False
    return True
