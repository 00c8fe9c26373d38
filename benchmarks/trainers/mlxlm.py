"""mlx-lm's tuner: its ``train`` as ``mlx_lm.lora --train`` calls it, nothing of it replaced."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.optimizers import AdamW

from openelm_mlx import device
from openelm_mlx.benchmarks.peers.mlxlm import NAME, model_of
from openelm_mlx.benchmarks.peers.onmlx import STOCK_BLAS, to_float32
from openelm_mlx.benchmarks.trainers.base import EOS, LEARNING_RATE, SCALE, About, TuningJob, Turn
from openelm_mlx.benchmarks.trainers.onmlx import about, made

_NEVER = 10**9
"""Steps until something that is not wanted here."""


class MlxLm:
    """mlx-lm's model with its adapters, and records of text as it keeps them; it pads rows, and does not pack them."""

    def __init__(self, job: TuningJob) -> None:
        from mlx_lm.tuner.trainer import TrainingArgs
        from mlx_lm.tuner.utils import linear_to_lora_layers

        t, tuner = job.training, job.tuner
        self.job = job
        mx.random.seed(0)  # as its command does, and NumPy's for its batches
        np.random.seed(0)
        self.model = model_of(job)
        if tuner.dtype == "float32":
            to_float32(self.model)
        if t.method == "full":
            self.model.unfreeze()  # its own command trains the layers alone, which is less work
        else:
            self.model.freeze()
            how = {"rank": t.rank, "scale": SCALE, "dropout": 0.0}  # no keys: all linear layers, its default
            linear_to_lora_layers(self.model, len(self.model.layers), how, use_dora=t.method == "dora")
        sequences = t.sequences(int(job.config["vocab_size"]))
        self.data: Any = [(ids, 0) for ids in sequences] if tuner.by_length else _as_records(sequences)
        self.args = TrainingArgs(
            batch_size=t.batch_size,
            iters=_NEVER,
            steps_per_report=1,
            steps_per_eval=_NEVER,
            steps_per_save=_NEVER,
            max_seq_length=t.seq_length + 1,
        )

    def about(self) -> About:
        """The BLAS is the one that importing this package loaded, if it was allowed to."""
        from mlx_lm import __version__

        blas = device.blas() if self.job.tuner.preloads else STOCK_BLAS
        return about(self.model, self.job.backend, blas, {NAME: __version__})

    def run(self, turn: Turn) -> None:
        """Its loop, which stands still between its reports; the time is the one it reports itself."""
        from mlx_lm.tuner.callbacks import TrainingCallback
        from mlx_lm.tuner.trainer import iterate_batches, train

        batches: list[tuple[tuple[int, ...], int]] = []

        def noted(**options: Any) -> Iterator[Any]:
            for ids, spans in iterate_batches(**options):
                # It counts, and learns, one token of padding a row: not what the data asks for.
                batches.append((ids.shape, int((spans[:, 1] - 1).sum())))
                yield ids, spans

        class Report(TrainingCallback):
            def on_train_loss_report(self, train_info: dict[str, Any]) -> None:
                shape, targets = batches.pop()
                seconds = 1 / train_info["iterations_per_second"]
                turn(made(float(train_info["train_loss"]), targets, (shape[0], shape[1] - 1), seconds))

        mx.reset_peak_memory()
        train(
            model=self.model,
            optimizer=AdamW(learning_rate=LEARNING_RATE),
            train_dataset=self.data,
            args=self.args,
            iterate_batches=noted,
            training_callback=Report(),
        )


class _Ids:
    """A tokenizer of text that is tokens already."""

    eos_token_id = EOS

    @staticmethod
    def encode(ids: list[int]) -> list[int]:
        return list(ids)


def _as_records(sequences: list[list[int]]) -> Any:
    """As its command reads JSON Lines; its batching takes the number of a record's keys for its length."""
    from mlx_lm.tuner.datasets import CacheDataset, TextDataset

    records: Any = [{"text": ids} for ids in sequences]
    tokenizer: Any = _Ids()
    return CacheDataset(TextDataset(records, tokenizer))


load = MlxLm
