"""Ten training steps against a golden file: losses and gradient norms."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from openelm_mlx.adapters import AdapterConfig, attach
from openelm_mlx.adapters.layers import PARTS
from openelm_mlx.finetune.data.types import Batch
from openelm_mlx.finetune.settings import Settings
from openelm_mlx.finetune.step import Trainer
from openelm_mlx.loading import load_model
from openelm_mlx.model import OpenELM
from tests.golden.checkpoints import Checkpoint, weights_module

LOSS_TOLERANCE = 1e-4
NORM_TOLERANCE = 2e-3

ROWS, WIDTH = 2, 25


@dataclass(frozen=True)
class Deviation:
    """How far ten steps are from their golden file."""

    loss: float
    """Largest absolute difference of a loss."""
    norm: float
    """Largest absolute difference of a gradient's norm."""

    @property
    def ok(self) -> bool:
        """Within both tolerances."""
        return self.loss <= LOSS_TOLERANCE and self.norm <= NORM_TOLERANCE

    def __str__(self) -> str:
        return f"losses {self.loss:.1e}, gradient norms {self.norm:.1e}"


def measure(source: Path, golden: dict[str, Any], folder: Path) -> Deviation:
    """Train the model in `source` (Hugging Face's layout) as the golden file says; `folder` holds weights.py."""
    model = load_model(source, dtype="float32")
    settings = Settings(
        method=golden["mode"],
        rank=golden["rank"],
        alpha=golden["alpha"],
        learning_rate=golden["learning_rate"],
        schedule="constant",
        warmup_steps=0,
        weight_decay=golden["weight_decay"],
        decay_exclude=(),
        max_grad_norm=0,
    )
    if golden["mode"] != "full":
        add_adapters(model, golden, folder)
    trainer = Trainer(model, settings)
    updates = [
        trainer.update([batch(step, golden, model.config.vocab_size)], settings.highest_rate)
        for step in range(golden["steps"])
    ]
    losses = np.abs([u.loss - x for u, x in zip(updates, golden["losses"], strict=True)])
    norms = np.abs([u.norm - x for u, x in zip(updates, golden["gradient_norms"], strict=True)])
    return Deviation(float(losses.max()), float(norms.max()))


def add_adapters(model: OpenELM, golden: dict[str, Any], folder: Path) -> None:
    """New adapters that begin as CoreNet's in the golden run: A from a hash of its name, B zero."""
    config = AdapterConfig(
        method=golden["mode"], rank=golden["rank"], alpha=golden["alpha"], targets=tuple(golden["targets"])
    )
    uniform = weights_module(folder).uniform
    values = []
    for path in attach(model, config):
        name = f"{path.removeprefix('transformer.')}.lora_A.lora.weight"
        inputs = dict(model.named_modules())[path][PARTS[0]].shape[0]
        values.append((f"{path}.lora_a", mx.array(uniform(name, (golden["rank"], inputs), golden["seed"]).T * 0.5)))
    model.load_weights(values, strict=False)


def batch(step: int, golden: dict[str, Any], vocab_size: int) -> Batch:
    """The tokens of a step, as the golden file's `batches` describes them."""
    k, count = step % 3, ROWS * WIDTH
    ids = (np.arange(count) * (k * 2 + 3) + golden["seed"] * 31 + k * 17) % (vocab_size - 3) + 3
    rows = ids.reshape(ROWS, WIDTH).astype(np.int32)
    inputs = WIDTH - 1
    return Batch(
        ids=rows[:, :-1],
        documents=((inputs,),) * ROWS,
        places=np.arange(ROWS * inputs, dtype=np.int32),
        targets=rows[:, 1:].reshape(-1),
        where=(),
    )


def run(golden: dict[str, Any], folder: Path, place: Path) -> Deviation:
    """Rebuild the golden file's weights in `place`, and train."""
    return measure(Checkpoint(folder, golden["case"], golden["seed"]).write("hf", place), golden, folder)
