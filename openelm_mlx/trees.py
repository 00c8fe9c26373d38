"""Parameters by name, and back to the trees that modules take."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

Tensors = dict[str, mx.array]


def flat(tree: Any) -> Tensors:
    """The arrays of a tree by their paths, in its order."""
    found: Any = tree_flatten(tree)  # its stub allows for another form of result
    return dict(found)


def nested(tensors: Tensors) -> Any:
    """Arrays by their paths as a tree."""
    return tree_unflatten(list(tensors.items()))


def trainable(model: nn.Module) -> Tensors:
    """A module's trainable parameters by name."""
    return flat(model.trainable_parameters())
