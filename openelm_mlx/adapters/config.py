"""What an adapter is: its method, rank and strength, and which layers it is for."""

from __future__ import annotations

import math
import re
import reprlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn

from openelm_mlx.adapters.patterns import layer_pattern
from openelm_mlx.errors import OpenELMError
from openelm_mlx.settings import whole_number

METHODS = ("lora", "dora")

LINEARS = ("qkv_proj", "out_proj", "proj_1", "proj_2")
"""The projections of every layer: what an adapter is for unless told otherwise."""

ALL_LAYERS = "all"

_LARGEST_RANK = 1 << 20
"""Above any width."""
_WEAKEST, _STRONGEST = 1e-30, 1e30
"""What an update may be multiplied by: within what float32 can hold."""

_LAYER = re.compile(r"transformer\.layers\.(\d+)\.")


class AdapterError(OpenELMError):
    """An adapter cannot be read, or does not fit the model."""


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """LoRA (Hu et al. 2021) or DoRA (Liu et al. 2024): the update is ``scale * B A``, which begins at zero.

    Raises:
        OpenELMError: a value is out of its range.
    """

    method: str = "lora"
    """``lora``; ``dora`` trains the lengths of the weights' rows apart from their directions. An embedding gets LoRA
    either way."""
    rank: int = 8
    """Of the update."""
    alpha: float = 16.0
    """The update's strength: it is multiplied by ``alpha / rank``."""
    dropout: float = 0.0
    """Part of the inputs that the update does not see in a training step."""
    rslora: bool = False
    """Multiply by ``alpha / sqrt(rank)`` instead (Kalajdzievski 2023)."""
    targets: tuple[str, ...] = LINEARS
    """Names of layers (``qkv_proj``, ``ffn.proj_1``, ``token_embeddings``), or regular expressions for whole paths."""
    layers: str = ALL_LAYERS
    """Which decoder layers: ``all``, ``8-15``, ``0,2,12-15``, or ``last-4``."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise OpenELMError(f"method must be one of {', '.join(METHODS)}, not {self.method!r}")
        rank_number("rank", self.rank)
        positive_number("alpha", self.alpha)
        if not _WEAKEST <= self.scale <= _STRONGEST:
            raise OpenELMError(f"alpha gives a scale of {self.scale:.3g}, not one of {_WEAKEST:g} to {_STRONGEST:g}")
        _number("dropout", self.dropout, lambda x: 0 <= x < 1, "a number from 0 to below 1")
        if not self.targets or not all(isinstance(t, str) and t for t in self.targets):
            raise OpenELMError("targets must be names of layers, at least one")
        _layer_numbers(self.layers, None)

    @property
    def scale(self) -> float:
        """What the update is multiplied by."""
        return scale_of(self.alpha, self.rank, rslora=self.rslora)


def scale_of(alpha: float, rank: int, *, rslora: bool) -> float:
    """What an update of this strength and rank is multiplied by."""
    return alpha / (math.sqrt(rank) if rslora else rank)


def rank_number(name: str, value: Any) -> int:
    """`value` if it can be a rank.

    Raises:
        OpenELMError: it cannot; the message has its name.
    """
    if whole_number(name, value, 1) > _LARGEST_RANK:
        raise OpenELMError(f"{name} must be at most {_LARGEST_RANK}, not {reprlib.repr(value)}")
    return int(value)


def positive_number(name: str, value: Any) -> float:
    """`value` as a float if it is a finite number above 0, which the strength of an update has to be.

    Raises:
        OpenELMError: it is something else; the message has its name.
    """
    _number(name, value, lambda x: 0 < x <= sys.float_info.max, "a number above 0")
    return float(value)


def _number(name: str, value: Any, ok: Any, range_: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not ok(value):
        raise OpenELMError(f"{name} must be {range_}, not {reprlib.repr(value)}")


KINDS = (nn.Linear, nn.QuantizedLinear, nn.Embedding, nn.QuantizedEmbedding)
"""Layers that can have an adapter."""


def adaptable(model: nn.Module) -> list[str]:
    """Paths of the layers that can have an adapter, in the model's order."""
    return [path for path, layer in model.named_modules() if isinstance(layer, KINDS)][::-1]


def find_targets(model: nn.Module, targets: Iterable[str], layers: str = ALL_LAYERS) -> list[str]:
    """Paths of the layers that the targets name, in the model's order.

    A target names a layer by the end of its path (``proj_1``, ``ffn.proj_1``) or is a regular expression that the
    whole path matches. `layers` narrows those that stand in a decoder layer.

    Raises:
        AdapterError: a target matches nothing, or `layers` names one that is not there.
    """
    paths = adaptable(model)
    chosen = _layer_numbers(layers, 1 + max((_layer_of(p) for p in paths), default=-1))
    allowed = [p for p in paths if _layer_of(p) < 0 or _layer_of(p) in chosen]
    found: set[str] = set()
    for target in targets:
        pattern = _pattern(target)
        matched = [p for p in allowed if pattern(p)]
        if not matched:
            names = ", ".join(dict.fromkeys(p.rpartition(".")[2] for p in paths))
            where = "" if layers == ALL_LAYERS else f" in layers {layers}"
            raise AdapterError(f"targets: {target!r} matches no layer{where}; the names there are: {names}")
        found.update(matched)
    return [p for p in paths if p in found]


def _layer_of(path: str) -> int:
    match = _LAYER.match(path)
    return int(match[1]) if match else -1


def _pattern(target: str) -> Any:
    try:
        regex = layer_pattern(target)
    except OpenELMError as e:
        raise AdapterError(f"targets: {e}") from None
    return lambda path: path == target or path.endswith(f".{target}") or regex.fullmatch(path) is not None


def _layer_numbers(text: str, count: int | None) -> set[int]:
    """The numbers a range of layers stands for; only its form is checked when `count` is None."""
    problem = OpenELMError(f"layers must be all, a range such as 8-15 or 0,2,12-15, or last-4, not {text!r}")
    if not isinstance(text, str):
        raise problem
    if text == ALL_LAYERS:
        return set(range(count or 0))
    if match := re.fullmatch(r"last-(\d{1,4})", text):
        first = (count or 0) - int(match[1])
        if int(match[1]) == 0 or (count is not None and first < 0):
            raise problem if count is None else AdapterError(f"layers: {text} of a model that has {count} layers")
        return set(range(max(first, 0), count or 0))
    numbers: set[int] = set()
    for part in text.replace(" ", "").split(","):
        match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", part)
        if not match or (match[2] and int(match[2]) < int(match[1])):
            raise problem
        numbers.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    if count is not None and max(numbers) >= count:
        raise AdapterError(f"layers: there is no layer {max(numbers)}; the model has {count}, from 0 to {count - 1}")
    return numbers
