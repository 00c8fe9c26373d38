"""This project, as ``openelm finetune`` trains."""

from __future__ import annotations

import time

import mlx.core as mx
import numpy as np

from openelm_mlx import __version__, device
from openelm_mlx.adapters import AdapterConfig, attach
from openelm_mlx.benchmarks.models import Subject, load_subject
from openelm_mlx.benchmarks.peers.base import OURS, packed_bits
from openelm_mlx.benchmarks.trainers.base import LEARNING_RATE, SCALE, About, Training, TuningJob, Turn
from openelm_mlx.benchmarks.trainers.onmlx import REMEDY, about, made
from openelm_mlx.errors import OpenELMError
from openelm_mlx.finetune.data.batches import Batches
from openelm_mlx.finetune.data.types import Encoded
from openelm_mlx.finetune.settings import Settings
from openelm_mlx.finetune.step import NotFinite, Trainer
from openelm_mlx.model import OpenELM


class Ours:
    """Our trainer with its default settings, on our batches: ragged sequences packed, as plain text is.

    Raises:
        OpenELMError: the model cannot be loaded, or is packed although all weights are to be trained.
    """

    def __init__(self, job: TuningJob) -> None:
        t, subject = job.training, Subject.from_json(job.subject)
        on_cpu = "float32" if job.backend == "cpu" else None
        model = load_subject(subject, cpu_weights=on_cpu, dtype=on_cpu)
        prepare(model, t, packed=packed_bits(subject) is not None)
        settings = Settings(
            method=t.method,
            rank=t.rank,
            alpha=SCALE * t.rank,
            batch_size=t.batch_size,
            packing="off" if t.ragged is None else "on",
        )
        self.job = job
        self.trainer = Trainer(model, settings)
        self.batches = Batches(
            [_encoded(ids) for ids in t.sequences(model.config.vocab_size)],
            batch_size=t.batch_size,
            pack=t.ragged is not None,
            row_length=t.seq_length,
            shuffle_window=settings.shuffle_window,
            seed=settings.seed,
        )

    def about(self) -> About:
        """Ours."""
        return about(self.trainer.model, self.job.backend, device.blas(), {OURS: __version__})

    def run(self, turn: Turn) -> None:
        """Updates as :class:`openelm_mlx.finetune.trainer.Run` makes them."""
        mx.reset_peak_memory()
        for batch in self.batches:
            start = time.perf_counter()
            try:
                update = self.trainer.update([batch], LEARNING_RATE)
            except NotFinite as e:
                raise OpenELMError(f"{e}; {REMEDY}") from None
            turn(made(update.loss, update.targets, batch.ids.shape, time.perf_counter() - start))


def prepare(model: OpenELM, training: Training, *, packed: bool) -> None:
    """Choose what of a loaded model is trained: all weights, or adapters beside frozen ones; in place.

    Raises:
        OpenELMError: packed weights cannot be trained themselves.
    """
    if training.method != "full":
        attach(model, AdapterConfig(method=training.method, rank=training.rank, alpha=SCALE * training.rank))
    elif packed:
        raise OpenELMError(
            "packed weights cannot be trained: use a model in bf16 or fp32, or the method lora, which leaves them alone"
        )
    else:
        model.unfreeze()


def _encoded(ids: list[int]) -> Encoded:
    learn = np.ones(len(ids), np.bool_)
    learn[0] = False
    return Encoded(np.array(ids, np.int32), learn, "")


load = Ours
