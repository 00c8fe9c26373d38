"""What the trainers have in common. Imports nothing heavy: a worker chooses its BLAS before MLX comes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from openelm_mlx.benchmarks.peers.base import Contender, Job
from openelm_mlx.benchmarks.protocol import WINDOW, prompt_ids
from openelm_mlx.errors import OpenELMError
from openelm_mlx.finetune.settings import METHODS
from openelm_mlx.settings import whole_number

LEARNING_RATE = 1e-4

SCALE = 2.0
"""Of an adapter's update, as alpha = 16 is for rank 8."""

EOS = 2
"""What every sequence ends with; nothing else in them is it."""

_RAGGED_BATCHES = 64
"""Batches that there are sequences for: with few of them, sorting by length would leave unlike ones together."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained, and how much of it is timed.

    Raises:
        OpenELMError: a value is out of its range.
    """

    method: str = "lora"
    """``full``: all weights; ``lora``, ``dora``: adapters on the four projections of every layer."""
    batch_size: int = 4
    """Rows a step."""
    seq_length: int = 512
    """Tokens a row that the model reads, each with a next one to predict."""
    steps: int = 10
    """Timed steps, after one that warms up."""
    rank: int = 8
    """Of adapters."""
    ragged: tuple[int, int] | None = None
    """Fewest and most tokens of sequences of random lengths; None: every sequence fills its row."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise OpenELMError(f"method must be one of {', '.join(METHODS)}, not {self.method!r}")
        for name in ("batch_size", "seq_length", "steps", "rank"):
            whole_number(name, getattr(self, name), 1)
        if self.seq_length > WINDOW:
            raise OpenELMError(f"sequences of {self.seq_length} tokens exceed the window of {WINDOW}")
        if self.ragged is not None:
            least, most = self.ragged
            if not 2 <= least <= most <= self.seq_length + 1:
                raise OpenELMError(
                    f"ragged must be two lengths, from 2 to {self.seq_length + 1} (one more than seq_length), "
                    f"not {least}-{most}"
                )

    def sequences(self, vocab_size: int) -> list[list[int]]:
        """Random ids, the same for every trainer; a sequence of n has n - 1 targets.

        Full batches are one batch, the same in every step: a loss that falls shows that the updates arrive.
        """
        if self.ragged is None:
            lengths = [self.seq_length + 1] * self.batch_size
        else:
            rng = random.Random(0)
            lengths = [rng.randint(*self.ragged) for _ in range(_RAGGED_BATCHES * self.batch_size)]
        ids = iter(prompt_ids(sum(lengths), vocab_size))
        return [[next(ids) for _ in range(n - 1)] + [EOS] for n in lengths]


@dataclass(frozen=True, kw_only=True)
class Tuner(Contender):
    """A trainer in one of its settings."""

    same_blas: bool = False
    """Whether it gets the BLAS that this package loads, though it is another program."""
    by_length: bool = False
    """Whether mlx-lm gets its data in a form whose lengths its batching sees."""

    @property
    def preloads(self) -> bool:
        return self.same_blas or super().preloads


@dataclass(frozen=True)
class TuningJob(Job):
    """What a worker trains."""

    training: Training

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> TuningJob:
        training = dict(values["training"])
        if training["ragged"] is not None:
            training["ragged"] = tuple(training["ragged"])
        return cls(**{**values, "contender": Tuner(**values["contender"]), "training": Training(**training)})

    @property
    def tuner(self) -> Tuner:
        """The contender."""
        assert isinstance(self.contender, Tuner)
        return self.contender


@dataclass(frozen=True)
class About:
    """What a trainer says of itself and of the model it trains."""

    trained: int
    """Parameters that are trained."""
    parameters: int
    """All parameters of the model, adapters included; packed ones count as what they stand for."""
    dtype: str
    """What it computes in."""
    blas: str
    """What multiplies its matrices, in words."""
    versions: dict[str, str]
    """Of its programs and libraries, by name."""


@dataclass(frozen=True)
class Step:
    """One update."""

    loss: float
    """Mean cross entropy before it, in nats, as the trainer reports it."""
    targets: int
    """Tokens of the data that were to be predicted: no padding, whatever the trainer counts."""
    rows: int
    length: int
    """Of the rows, padding included."""
    seconds: float
    """From the batch, ready, to the updated parameters."""
    peak_memory_gb: float
    """Most memory MLX held since the first step began, weights included; units of 1e9 bytes."""
    process_gb: float
    """Most memory the process held so far, from its start; the same units."""


Turn = Callable[[Step], None]
"""Takes what a trainer did; returns when the next step is wanted."""


class Loaded(Protocol):
    """A trainer with its model and data, ready to begin."""

    def about(self) -> About:
        """What it is."""

    def run(self, turn: Turn) -> None:
        """Make steps until `turn` raises something."""
