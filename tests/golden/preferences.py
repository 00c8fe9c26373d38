"""Log-probabilities of pairs' responses, by a policy and a reference, and the DPO losses of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from openelm_mlx.finetune.data.batches import batch_of
from openelm_mlx.finetune.data.types import Batch, Encoded
from openelm_mlx.finetune.losses import Arrays, evaluated_states
from openelm_mlx.finetune.preferences import Preferences, response_logps, row_keys
from openelm_mlx.finetune.settings import DPO_LOSSES, Settings
from openelm_mlx.finetune.step import Trainer, written_out
from openelm_mlx.loading import load_model
from openelm_mlx.model import OpenELM
from tests.golden.checkpoints import Checkpoint

LOGP_TOLERANCE = 1e-3
LOSS_TOLERANCE = 1e-4

RESPONSES = ("chosen", "rejected")


@dataclass(frozen=True)
class Deviation:
    """How far pairs are from their golden file."""

    logp: float
    """Largest absolute difference of a response's log-probability."""
    loss: float
    """Largest absolute difference of a pair's margin or loss, of either kind."""
    mean: float
    """The same for the mean of all pairs, in one batch."""

    @property
    def ok(self) -> bool:
        """Within all tolerances."""
        return self.logp <= LOGP_TOLERANCE and max(self.loss, self.mean) <= LOSS_TOLERANCE

    def __str__(self) -> str:
        return f"log-probabilities {self.logp:.1e}, losses {self.loss:.1e}, mean losses {self.mean:.1e}"


def measure(golden: dict[str, Any], policy: Path, reference: Path) -> Deviation:
    """Compare the models in two folders (Hugging Face's layout) with a golden file's pairs."""
    pairs = golden["pairs"]
    batches = [batch(pair) for pair in pairs]
    models = {"policy": load_model(policy, dtype="float32"), "reference": load_model(reference, dtype="float32")}
    logps = {name: np.stack([_logps(model, b) for b in batches]) for name, model in models.items()}
    expected = {name: np.array([[p[f"{name}_{r}_logp"] for r in RESPONSES] for p in pairs]) for name in models}
    keys = [key for b in batches for key in row_keys(b)]
    known = dict(zip(keys, logps["reference"].ravel().tolist(), strict=True))
    losses, means = [], []
    whole = batch_of([[row] for pair in pairs for row in rows(pair)])
    for kind in DPO_LOSSES:
        settings = Settings(method="full", objective="dpo", dpo_loss=kind, beta=golden["beta"])
        trainer = Trainer(models["policy"], settings, Preferences(kind, golden["beta"], known))
        for b, pair in zip(batches, pairs, strict=True):
            found = trainer.evaluate(b)
            losses += [abs(found["loss"] - pair[kind]), abs(found["margin"] - pair["margin"])]
        means.append(abs(trainer.evaluate(whole)["loss"] / len(pairs) - np.mean([pair[kind] for pair in pairs])))
        means.append(abs(trainer.update([whole], 1e-9).loss - np.mean([pair[kind] for pair in pairs])))
    return Deviation(
        logp=max(float(np.abs(logps[name] - expected[name]).max()) for name in models),
        loss=max(losses),
        mean=float(max(means)),
    )


def rows(pair: dict[str, Any]) -> list[Encoded]:
    """Prompt and response of a pair's two rows."""
    prompt = pair["prompt"]
    return [
        Encoded(
            np.array([*prompt, *pair[name]], np.int32),
            np.arange(len(prompt) + len(pair[name])) >= len(prompt),
            name,
        )
        for name in RESPONSES
    ]


def batch(pair: dict[str, Any]) -> Batch:
    """The batch of a single pair."""
    return batch_of([[row] for row in rows(pair)])


def _logps(model: OpenELM, pair: Batch) -> npt.NDArray[np.float64]:
    arrays, on_cpu = Arrays.of(pair, fill_up=False), written_out(model)
    hidden = evaluated_states(model, arrays, on_cpu=on_cpu)
    return np.asarray(response_logps(model, hidden, arrays, mx.eval), np.float64)


def run(golden: dict[str, Any], folder: Path, place: Path) -> Deviation:
    """Rebuild the weights of both models in `place`, and compare; `folder` holds weights.py."""
    policy, reference = (
        Checkpoint(folder, golden["case"], golden[f"{name}_seed"]).write("hf", place / name)
        for name in ("policy", "reference")
    )
    return measure(golden, policy, reference)
