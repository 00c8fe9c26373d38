"""One update: the gradients of its batches, added up by token, clipped, and applied."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from openelm_mlx import device
from openelm_mlx.errors import OpenELMError
from openelm_mlx.finetune.data.types import Batch
from openelm_mlx.finetune.losses import Arrays, batch_loss, cpu_loss_and_gradients, loss_alone
from openelm_mlx.finetune.optimizer import AdamW, gradient_norm
from openelm_mlx.finetune.recompute import recompute_layers
from openelm_mlx.finetune.settings import Settings
from openelm_mlx.model import OpenELM
from openelm_mlx.trees import Tensors, flat, trainable


class NotFinite(OpenELMError):
    """A loss or a gradient is infinite or no number; nothing was changed by it."""


@dataclass(frozen=True)
class Update:
    """What an update did."""

    loss: float
    """Mean cross entropy of its targets before it, in nats."""
    norm: float
    """Of the gradient of that mean, before clipping."""
    targets: int
    tokens: int
    """Inputs that are no padding."""


class Trainer:
    """A model in training, and its optimizer. The model's trainable parameters are trained, in place."""

    def __init__(self, model: OpenELM, settings: Settings) -> None:
        self.model = model
        self.settings = settings
        self.optimizer = AdamW(trainable(model), settings)
        self._on_cpu = device.backend() == "cpu" and model.transformer.norm.weight.dtype == mx.float32
        device.settle_for_training()
        if settings.gradient_checkpointing and not self._on_cpu:
            recompute_layers(model)
        self._step = None if self._on_cpu else self._compiled()

    def _gradients(self, batch: Arrays, seed: int) -> tuple[mx.array, Tensors]:
        """Sum of the losses of a batch, and its gradients by name."""
        if self._step is not None:
            return self._step(batch, seed)
        return cpu_loss_and_gradients(
            self.model, batch, seed, recompute=self.settings.gradient_checkpointing, z_loss=self.settings.z_loss
        )

    def _compiled(self) -> Callable[[Arrays, int], tuple[mx.array, Tensors]]:
        """The same as a compiled function."""
        state = [self.model.state, mx.random.state]
        both = nn.value_and_grad(self.model, batch_loss)

        @partial(mx.compile, inputs=state, outputs=[mx.random.state])
        def compiled(ids: mx.array, places: mx.array, targets: mx.array, weights: mx.array, starts: Any) -> Any:
            return both(self.model, Arrays(ids, places, targets, weights, starts, None), self.settings.z_loss)

        def run(a: Arrays, seed: int) -> tuple[mx.array, Tensors]:
            mx.random.seed(seed)
            parameters = self.model.trainable_parameters()
            try:
                loss, tree = compiled(a.ids, a.places, a.targets, a.weights, a.starts)
            finally:  # tracing leaves its own in their places
                self.model.update(parameters)
            return loss, flat(tree)

        return run

    def update(self, batches: Sequence[Batch], learning_rate: float) -> Update:
        """Make one update from the batches, whose targets all count alike.

        Raises:
            NotFinite: the loss or a gradient is not finite; the model and the optimizer are as before.
        """
        self.model.train()
        total, sums = 0.0, Tensors()
        for number, batch in enumerate(batches):
            loss, gradients = self._gradients(Arrays.of(batch, fill_up=not self._on_cpu), self._seed(number))
            if len(batches) > 1:  # 16 bits are too few to add up in
                gradients = {name: g.astype(mx.float32) for name, g in gradients.items()}
            sums = {name: sums[name] + g for name, g in gradients.items()} if sums else gradients
            del gradients  # or they would take memory in what follows
            mx.eval(loss, sums)
            total += float(loss)
        targets = sum(len(b.targets) for b in batches)
        mean, norm = total / targets, float(gradient_norm(sums)) / targets
        if not (math.isfinite(mean) and math.isfinite(norm)):
            raise NotFinite(f"the {'gradient' if math.isfinite(mean) else 'loss'} is not finite")
        most = self.settings.max_grad_norm
        clipped = min(1.0, most / (norm + 1e-6)) if most else 1.0
        self.optimizer.update(self.model, sums, learning_rate, clipped / targets)
        return Update(mean, norm, targets, sum(b.tokens for b in batches))

    def _seed(self, batch: int) -> int:
        """Of the dropout in a batch of this update: a resumed run has the same."""
        values = (self.settings.seed, self.optimizer.steps, batch)
        return int(np.random.SeedSequence(values).generate_state(1)[0])

    def evaluate(self, batch: Batch) -> float:
        """Sum of the cross entropies of a batch's targets, without dropout."""
        self.model.eval()
        return loss_alone(self.model, Arrays.of(batch, fill_up=not self._on_cpu), on_cpu=self._on_cpu)
