"""Reading a computation's primitives off MLX's graph, as a GPU would dispatch them.

A CPU's graph shows the functions of ``mx.fast`` as the handful of operations they fall back to, so while a step is
traced each of them is replaced by one opaque primitive of the same shape; the graph is then walked back from the step's
results. Nothing is evaluated.
"""

from __future__ import annotations

import functools
import io
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Thread
from typing import Any

import mlx.core as mx

from openelm_mlx.errors import OpenELMError

Step = Callable[[], Sequence[mx.array]]
"""Builds one decode step and returns what generation evaluates: the token and its log-probabilities."""

VIEWS = frozenset(
    {
        "AsStrided",
        "Broadcast",
        "BroadcastAxes",
        "Copy",
        "CustomTransforms",
        "Depends",
        "ExpandDims",
        "Flatten",
        "NumberOfElements",
        "Reshape",
        "Slice",
        "Split",
        "Squeeze",
        "StopGradient",
        "Transpose",
        "Unflatten",
        "View",
    }
)
"""Primitives whose ``eval_gpu`` shares a buffer and launches nothing (mlx/backend/gpu/primitives.cpp and
mlx/backend/common/common.cpp). Flatten, Reshape, Unflatten and View copy arrays with gaps, which no decode step of one
token has."""


def primitives(step: Step) -> dict[str, int]:
    """Count the primitives of one step.

    The functions of ``mx.fast`` are replaced in the whole process while `step` runs, so nothing else may compute then.

    Returns:
        MLX's name of a primitive -> how often, views left out. ``Compiled`` is one kernel of an mx.compile'd function,
        whatever is in it.

    Raises:
        OpenELMError: mx.compile is off, so that what a GPU runs as one kernel would count as several.
    """

    def traced() -> dict[str, int]:
        with _opaque_functions():
            _check_compile()
            return _count(step())

    outcome: Future[dict[str, int]] = Future()
    _jobs().put((outcome, traced))
    return outcome.result()


# ---- a thread for it -----------------------------------------------------------------------------------------------

_Jobs = SimpleQueue[tuple[Future[dict[str, int]], Callable[[], dict[str, int]]]]


@functools.cache
def _jobs() -> _Jobs:
    """The queue of the one thread that traces.

    mx.compile keeps what it traced by thread: this way no opaque primitive stays behind in a compiled function that is
    used later, and no fallback that was compiled earlier is counted. The thread never ends: MLX frees its compiled
    functions when it does, and aborts the process if that happens while Python shuts down.
    """
    jobs: _Jobs = SimpleQueue()
    Thread(target=_work, args=(jobs,), name="dispatches", daemon=True).start()
    return jobs


def _work(jobs: _Jobs) -> None:
    while True:
        outcome, job = jobs.get()
        try:
            outcome.set_result(job())
        except BaseException as e:
            outcome.set_exception(e)
        del outcome, job  # and with them the model, while the next one is waited for


# ---- tracing -------------------------------------------------------------------------------------------------------

_FUSED = (
    (mx.fast, "rms_norm", "RMSNorm", True),
    (mx.fast, "layer_norm", "LayerNorm", True),
    (mx.fast, "rope", "RoPE", False),
    (mx.fast, "scaled_dot_product_attention", "ScaledDotProductAttention", True),
    (mx, "dequantize", "Quantize", False),  # outside mx.fast, but one kernel on a GPU too
)
"""Where each fused function is, MLX's name of its primitive, and whether MLX first converts its floating inputs to one
dtype (mlx/fast.cpp)."""

_MARK = "fused "


@functools.cache
def _marks() -> dict[str, mx.array]:
    """Name -> the array that is an input of every opaque primitive of this kind, by which a graph tells them apart.

    The same ones for good, since functions compiled in an earlier count hold them.
    """
    # One dimension each: equal scalars are merged in a compiled function.
    marks = {_MARK + primitive: mx.zeros((1,), mx.uint8) for _, _, primitive, _ in _FUSED}
    mx.eval(marks)
    return marks


@contextmanager
def _opaque_functions() -> Iterator[None]:
    """Replace MLX's fused functions by opaque ones."""
    originals = [getattr(holder, name) for holder, name, _, _ in _FUSED]
    try:
        for original, (holder, name, primitive, converts) in zip(originals, _FUSED, strict=True):
            setattr(holder, name, _opaque(original, _marks()[_MARK + primitive], converts))
        yield
    finally:
        for original, (holder, name, _, _) in zip(originals, _FUSED, strict=True):
            setattr(holder, name, original)


def _opaque(original: Callable[..., mx.array], mark: mx.array, converts: bool) -> Callable[..., mx.array]:
    """A function whose result has the shape and dtype of `original`'s, and is one primitive (and views)."""

    def function(*args: Any, **kwargs: Any) -> mx.array:
        like = original(*args, **kwargs)  # only asked for its shape and dtype, and never evaluated
        parts = [mark]
        for value in (*args, *kwargs.values()):
            if isinstance(value, mx.array):
                if converts and mx.issubdtype(value.dtype, mx.floating):
                    value = value.astype(like.dtype)  # nothing in the usual case of equal dtypes
                parts.append(value.reshape(-1).view(mx.uint8))
        *outer, last = like.shape
        joined = mx.concatenate(parts)
        return mx.as_strided(joined, (*outer, last * like.dtype.size), [0] * like.ndim).view(like.dtype)

    return function


def _count(results: Sequence[mx.array]) -> dict[str, int]:
    """Count what the results are made by, views left out."""
    marks = _marks()
    names = {f"result {i}": array for i, array in enumerate(results)}
    text = io.StringIO()
    mx.export_to_dot(text, **marks, **names)
    maker = {output: node for node in _nodes(text.getvalue()) for output in node.outputs}
    counts: Counter[str] = Counter()
    waiting, done = list(names), set()
    while waiting:
        node = maker.get(waiting.pop())
        if node is None or id(node) in done:  # an array that is there already, or another output of the same node
            continue
        done.add(id(node))
        waiting += node.inputs
        fused = [name.removeprefix(_MARK) for name in node.inputs if name in marks]
        name = fused[0] if fused else node.primitive
        counts[name] += name not in VIEWS
    return dict(sorted((+counts).items()))


@dataclass
class _Node:
    """One primitive at one place of the graph, and the names of the arrays around it."""

    primitive: str
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)


_LINE = re.compile(r'\{ \d+ \[label ="(?P<label>[^"]*)"|"(?P<input>[^"]*)" -> \d+|\d+ -> "(?P<output>[^"]*)"')


def _nodes(dot: str) -> list[_Node]:
    """The nodes of an exported graph.

    Read in order (a node, its inputs, its outputs), since all calls of a compiled function have the same identifier.
    """
    nodes: list[_Node] = []
    for line in _LINE.finditer(dot):
        if line["label"] is not None:
            name = line["label"].split(" ")[0]  # a dtype may follow
            nodes.append(_Node("Compiled" if name.startswith("Compiled") else name))
        elif line["input"] is not None:
            nodes[-1].inputs.append(line["input"])
        else:
            nodes[-1].outputs.append(line["output"])
    return nodes


def _check_compile() -> None:
    """Refuse to count where mx.compile is off, as it is on a CPU without a C++ compiler."""

    def two(x: mx.array) -> mx.array:
        return mx.exp(x) * x

    if "Exp" in _count([mx.compile(two)(mx.zeros((2,)))]):
        raise OpenELMError(
            "dispatches cannot be counted: mx.compile is off, so fused kernels would count as several; "
            "install a C++ compiler (g++ in PATH), and unset MLX_DISABLE_COMPILE"
        )
