"""One update: the gradients of its batches, added up by token or pair, clipped, and applied."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from openelm_mlx import device
from openelm_mlx.errors import OpenELMError
from openelm_mlx.finetune.data.types import Batch
from openelm_mlx.finetune.losses import Arrays, NextToken, Objective, batch_loss, cpu_sums_and_gradients, sums_alone
from openelm_mlx.finetune.optimizer import AdamW, gradient_norm
from openelm_mlx.finetune.recompute import recompute_layers
from openelm_mlx.finetune.settings import Settings
from openelm_mlx.model import OpenELM
from openelm_mlx.trees import Tensors, flat, trainable


class NotFinite(OpenELMError):
    """A loss or a gradient is infinite or no number; nothing was changed by it."""


def written_out(model: OpenELM) -> bool:
    """Whether the passes of `openelm_mlx.cpu.backprop` are for this model: float32 on a CPU."""
    return device.backend() == "cpu" and model.transformer.norm.weight.dtype == mx.float32


@dataclass(frozen=True)
class Update:
    """What an update did."""

    figures: dict[str, float]
    """The objective's figures before it, as means; ``loss`` is one."""
    norm: float
    """Of the gradient of the mean loss, before clipping."""
    targets: int
    tokens: int
    """Inputs that are no padding."""

    @property
    def loss(self) -> float:
        """The mean loss before it."""
        return self.figures["loss"]


class Trainer:
    """A model in training, and its optimizer. The model's trainable parameters are trained, in place.

    Args:
        model: what is trained.
        settings: how.
        objective: what for; by default to predict each next token.
    """

    def __init__(self, model: OpenELM, settings: Settings, objective: Objective | None = None) -> None:
        self.model = model
        self.settings = settings
        self.objective: Objective = NextToken(settings.z_loss) if objective is None else objective
        self.optimizer = AdamW(trainable(model), settings)
        self._on_cpu = written_out(model)
        device.settle_for_training()
        if settings.gradient_checkpointing and not self._on_cpu:
            recompute_layers(model)
        self._step = None if self._on_cpu else self._compiled()

    def _gradients(self, batch: Arrays, seed: int) -> tuple[mx.array, Tensors]:
        """The objective's sums over a batch, and the gradients of the loss by name."""
        if self._step is not None:
            return self._step(batch, seed)
        return cpu_sums_and_gradients(
            self.model, batch, self.objective, seed, recompute=self.settings.gradient_checkpointing
        )

    def _compiled(self) -> Callable[[Arrays, int], tuple[mx.array, Tensors]]:
        """The same as a compiled function."""
        state = [self.model.state, mx.random.state]
        both = nn.value_and_grad(self.model, batch_loss)

        @partial(mx.compile, inputs=state, outputs=[mx.random.state])
        def compiled(
            ids: mx.array, places: mx.array, targets: mx.array, weights: mx.array, starts: Any, reference: Any
        ) -> Any:
            arrays = Arrays(ids, places, targets, weights, starts, None, reference)
            (_, sums), tree = both(self.model, arrays, self.objective)
            return sums, tree

        def run(a: Arrays, seed: int) -> tuple[mx.array, Tensors]:
            mx.random.seed(seed)
            parameters = self.model.trainable_parameters()
            try:
                sums, tree = compiled(a.ids, a.places, a.targets, a.weights, a.starts, a.reference)
            finally:  # tracing leaves its own in their places
                self.model.update(parameters)
            return sums, flat(tree)

        return run

    def update(self, batches: Sequence[Batch], learning_rate: float) -> Update:
        """Make one update from the batches; what the objective counts in them counts alike.

        Raises:
            NotFinite: the loss or a gradient is not finite; the model and the optimizer are as before.
        """
        self.model.train()
        totals, sums = np.zeros(len(self.objective.figures)), Tensors()
        for number, batch in enumerate(batches):
            figures, gradients = self._gradients(self._arrays(batch), self._seed(number))
            if len(batches) > 1:  # 16 bits are too few to add up in
                gradients = {name: g.astype(mx.float32) for name, g in gradients.items()}
            sums = {name: sums[name] + g for name, g in gradients.items()} if sums else gradients
            del gradients  # or they would take memory in what follows
            mx.eval(figures, sums)
            totals += np.asarray(figures, np.float64)
        count = sum(map(self.objective.count, batches))
        means = self._named(totals / count)
        loss, norm = means["loss"], float(gradient_norm(sums)) / count
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise NotFinite(f"the {'gradient' if math.isfinite(loss) else 'loss'} is not finite")
        most = self.settings.max_grad_norm
        clipped = min(1.0, most / (norm + 1e-6)) if most else 1.0
        self.optimizer.update(self.model, sums, learning_rate, clipped / count)
        return Update(means, norm, sum(len(b.targets) for b in batches), sum(b.tokens for b in batches))

    def _arrays(self, batch: Batch) -> Arrays:
        return self.objective.arrays(batch, fill_up=not self._on_cpu)

    def _named(self, figures: npt.NDArray[np.float64]) -> dict[str, float]:
        return dict(zip(self.objective.figures, figures.tolist(), strict=True))

    def _seed(self, batch: int) -> int:
        """Of the dropout in a batch of this update: a resumed run has the same."""
        values = (self.settings.seed, self.optimizer.steps, batch)
        return int(np.random.SeedSequence(values).generate_state(1)[0])

    def evaluate(self, batch: Batch) -> dict[str, float]:
        """The objective's sums over a batch by name, without dropout."""
        self.model.eval()
        sums = sums_alone(self.model, self._arrays(batch), self.objective, on_cpu=self._on_cpu)
        return self._named(np.asarray(sums, np.float64))
