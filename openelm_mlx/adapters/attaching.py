"""Putting adapters into a model and taking them out again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from openelm_mlx.adapters.config import AdapterConfig, AdapterError, find_targets
from openelm_mlx.adapters.layers import ADAPTED, EMBEDDINGS, PARTS, DoRALinear, adapted, shape_of


def attach(model: nn.Module, config: AdapterConfig, *, paths: Iterable[str] | None = None, seed: int = 0) -> list[str]:
    """Give a model new adapters, which change nothing yet, and freeze everything else; in place.

    Args:
        model: without adapters.
        config: what they are like and which layers get one.
        paths: these layers instead of those that `config` names.
        seed: of their random parts; each layer has its own.

    Returns:
        The paths of the layers that have one now.

    Raises:
        AdapterError: a target matches no layer, or the model has adapters already.
    """
    if adapters_of(model):
        raise AdapterError("the model has adapters already; take them out first (openelm_mlx.adapters.detach)")
    chosen = find_targets(model, config.targets, config.layers) if paths is None else list(paths)
    layers = dict(model.named_modules())
    keys = mx.random.split(mx.random.key(seed), len(chosen) + 1)
    model.freeze()
    new = [(path, adapted(layers[path], config, keys[n])) for n, path in enumerate(chosen)]
    for _, layer in new:
        if isinstance(layer, DoRALinear):
            layer.settle()
    tree: Any = tree_unflatten(new)
    model.update_modules(tree)
    model.train(model.training)  # the new layers too
    return chosen


def count_parameters(model: nn.Module, config: AdapterConfig) -> int:
    """How many parameters of their own the adapters would have that :func:`attach` makes; nothing is computed.

    Raises:
        AdapterError: a target matches no layer.
    """
    layers = dict(model.named_modules())
    count = 0
    for path in find_targets(model, config.targets, config.layers):
        rows, columns = shape_of(layers[path])
        count += config.rank * (rows + columns)
        if config.method == "dora" and not isinstance(layers[path], EMBEDDINGS):
            count += rows
    return count


def detach(model: nn.Module) -> None:
    """Take a model's adapters out, in place: it is the base again."""
    plain: Any = tree_unflatten([(path, layer.base) for path, layer in adapters_of(model).items()])
    model.update_modules(plain)


@contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """A model without its adapters for a while: what it does then is what the base does."""
    layers: Any = tree_unflatten(list(adapters_of(model).items()))
    detach(model)
    try:
        yield
    finally:
        model.update_modules(layers)


def adapters_of(model: nn.Module) -> dict[str, nn.Module]:
    """The adapted layers of a model by path, in its order."""
    return dict([(path, layer) for path, layer in model.named_modules() if isinstance(layer, ADAPTED)][::-1])


def adapter_tensors(model: nn.Module) -> dict[str, mx.array]:
    """The adapters' own parameters by full name, as they are kept in a file."""
    return {
        f"{path}.{name}": layer[name] for path, layer in adapters_of(model).items() for name in PARTS if name in layer
    }
