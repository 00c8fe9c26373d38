"""AdamW (Loshchilov & Hutter 2019) with bias correction, and the learning rate's course."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import mlx.core as mx
import mlx.nn as nn

from openelm_mlx.finetune.settings import Settings
from openelm_mlx.trees import Tensors, nested, trainable

_AT_ONCE = 1 << 28
"""Bytes of parameters updated at a time: old and new values of all of them at once would not fit."""


class AdamW:
    """Decoupled weight decay, moments and arithmetic in float32 whatever the parameters are.

    Parameters of less precision have float32 copies here, which are what is trained: steps of a usual learning rate
    are too small for bfloat16 to notice.
    """

    def __init__(self, parameters: Tensors, settings: Settings) -> None:
        self._settings = settings
        self.steps = 0
        """Updates made."""
        self.mean = {name: mx.zeros(p.shape) for name, p in parameters.items()}
        self.square = {name: mx.zeros(p.shape) for name, p in parameters.items()}
        self.exact = {name: p.astype(mx.float32) for name, p in parameters.items() if p.dtype != mx.float32}

    @property
    def state(self) -> Tensors:
        """Everything but the number of steps, by name: for a checkpoint."""
        parts = {"mean": self.mean, "square": self.square, "exact": self.exact}
        return {f"{part}.{name}": value for part, values in parts.items() for name, value in values.items()}

    def load_state(self, tensors: Tensors, steps: int) -> None:
        """Go on from a checkpoint's :attr:`state`."""
        self.steps = steps
        for part, values in (("mean", self.mean), ("square", self.square), ("exact", self.exact)):
            values.update({name: tensors[f"{part}.{name}"] for name in values})

    def update(self, model: nn.Module, gradients: Tensors, learning_rate: float, scale: float = 1.0) -> None:
        """One step of a model's trained parameters, in place.

        Args:
            model: the parameters', which are those of the gradients' names.
            gradients: by name; emptied as they are used, so that their memory can be used again.
            learning_rate: for this step.
            scale: what the gradients are multiplied by.
        """
        self.steps += 1
        s = self._settings
        scalars = (
            mx.array(scale),
            mx.array(learning_rate),
            mx.array(1 - s.beta1**self.steps),
            mx.array(math.sqrt(1 - s.beta2**self.steps)),
        )
        for names in _groups(trainable(model)):
            everything = trainable(model)
            old = {name: everything[name] for name in names}
            del everything
            for name in names:
                decay = 0.0 if _excluded(name, s.decay_exclude) else s.weight_decay
                values = (self.exact.get(name, old[name]), gradients.pop(name), self.mean[name], self.square[name])
                exact, self.mean[name], self.square[name] = _adamw(*values, *scalars, s.beta1, s.beta2, s.eps, decay)
                if name in self.exact:
                    self.exact[name] = exact
                old[name] = exact.astype(old[name].dtype)
                del exact, values
            model.update(nested(old))
            mx.eval([(old[n], self.mean[n], self.square[n], self.exact.get(n)) for n in names])


@partial(mx.compile, shapeless=True)
def _adamw(
    parameter: mx.array,
    gradient: mx.array,
    mean: mx.array,
    square: mx.array,
    scale: mx.array,
    learning_rate: mx.array,
    mean_share: mx.array,
    root_share: mx.array,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
) -> tuple[mx.array, mx.array, mx.array]:
    gradient = gradient.astype(mx.float32) * scale
    mean = beta1 * mean + (1 - beta1) * gradient
    square = beta2 * square + (1 - beta2) * mx.square(gradient)
    parameter = parameter * (1 - learning_rate * decay)
    step = (learning_rate / mean_share) * mean / (mx.sqrt(square) / root_share + eps)
    return parameter - step, mean, square


def _groups(parameters: Tensors) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    size = 0
    for name, p in parameters.items():
        if groups[-1] and size + p.size * 4 > _AT_ONCE:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += p.size * 4
    return groups


def _excluded(name: str, parts: Sequence[str]) -> bool:
    return any(part in name for part in parts)


def gradient_norm(gradients: Tensors) -> mx.array:
    """The norm of all gradients together, float32."""
    squares = [mx.square(g.astype(mx.float32)).sum() for g in gradients.values()]
    return mx.sqrt(mx.stack(squares).sum())


def learning_rate(step: int, total: int, settings: Settings) -> float:
    """The learning rate of update `step`, from 0, of `total`: a linear rise, then the schedule."""
    s = settings
    warmup = warmup_steps(total, s)
    if step < warmup:
        return s.highest_rate * (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    fall = {"constant": 0.0, "linear": done, "cosine": 0.5 - 0.5 * math.cos(math.pi * done)}[s.schedule]
    return s.highest_rate - fall * (s.highest_rate - s.lowest_rate)


def warmup_steps(total: int, settings: Settings) -> int:
    """Updates in which the learning rate rises."""
    if settings.warmup_steps is not None:
        return settings.warmup_steps
    return math.floor(total * settings.warmup_ratio + 1e-9)  # 0.29 * 100 is a little below 29
