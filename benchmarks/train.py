"""``openelm bench train``: fine-tuning speed, of all weights or of LoRA adapters.

One training step as mlx-lm's trainer has it: next-token cross entropy, AdamW, forward, backward and update in one
compiled function. The batch is random ids, the same in every step, so that a loss that falls shows that the updates
arrive.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import AdamW
from mlx.utils import tree_flatten

from openelm_mlx import device
from openelm_mlx.benchmarks.models import Subject, load_subject
from openelm_mlx.benchmarks.protocol import WINDOW, Spread, prompt_ids
from openelm_mlx.errors import OpenELMError
from openelm_mlx.model import OpenELM
from openelm_mlx.settings import whole_number

METHODS = ("full", "lora")

LEARNING_RATE = 1e-4

_SCALE = 2.0
"""Of LoRA's update, as alpha = 16 is for rank 8."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained, and how much of it is timed.

    Raises:
        OpenELMError: a value is out of its range.
    """

    method: str = "full"
    """``full``: all weights; ``lora``: adapters on the four projections of every layer."""
    batch_size: int = 4
    """Sequences a step."""
    seq_length: int = 512
    """Tokens a sequence that the model reads, each with a next one to predict."""
    steps: int = 10
    """Timed steps, after one that compiles and warms up."""
    rank: int = 8
    """Of LoRA's adapters."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise OpenELMError(f"method must be one of {', '.join(METHODS)}, not {self.method!r}")
        for name in ("batch_size", "seq_length", "steps", "rank"):
            whole_number(name, getattr(self, name), 1)
        if self.seq_length > WINDOW:
            raise OpenELMError(f"sequences of {self.seq_length} tokens exceed the window of {WINDOW}")


@dataclass(frozen=True)
class TrainReport:
    """How fast a model trained."""

    model: str
    precision: str
    backend: str
    training: Training
    trained: int
    """Parameters that are trained."""
    parameters: int
    """All parameters of the model, adapters included."""
    tokens_per_s: Spread
    """Batch size times sequence length, over the time of a step, update included."""
    first_loss: float
    """Mean cross entropy in the warm-up step, in nats."""
    last_loss: float
    peak_memory_gb: float
    """Most memory MLX held from the warm-up step on, weights included; 1e9 bytes."""

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def measure(
    subject: Subject, training: Training, *, cpu_weights: str | None = None, dtype: str | None = None
) -> TrainReport:
    """Train a model on one random batch and time the steps.

    Raises:
        OpenELMError: the model cannot be loaded, is packed although all weights are to be trained, or the loss is not
            finite.
    """
    model = load_subject(subject, cpu_weights=cpu_weights, dtype=dtype)
    prepare(model, training)
    batch = random_batch(model, training)
    step = training_step(model)
    mx.reset_peak_memory()
    losses: list[float] = []
    seconds: list[float] = []
    for _ in range(training.steps + 1):
        start = time.perf_counter()
        loss = step(batch)
        seconds.append(time.perf_counter() - start)
        if not math.isfinite(loss):
            raise OpenELMError(
                f"{subject.name}: the loss became {loss} after {len(losses)} steps; train in bfloat16 or float32"
            )
        losses.append(loss)
    tokens = training.batch_size * training.seq_length
    return TrainReport(
        model=subject.name,
        precision=subject.precision,
        backend=device.backend(),
        training=training,
        trained=sum(array.size for _, array in _flat(model.trainable_parameters())),
        parameters=parameters(model),
        tokens_per_s=Spread.of([tokens / s for s in seconds[1:]]),
        first_loss=losses[0],
        last_loss=losses[-1],
        peak_memory_gb=mx.get_peak_memory() / 1e9,
    )


def lines(report: TrainReport) -> list[str]:
    """A summary for people."""
    r, t = report, report.training
    rate = r.tokens_per_s
    what = "all weights" if t.method == "full" else f"LoRA of rank {t.rank}"
    return [
        f"{r.model} ({r.precision}), {what}, on {r.backend}: {t.steps} steps of {t.batch_size} x {t.seq_length} tokens",
        f"  {rate.median:.1f} tokens/s ({rate.least:.1f} to {rate.most:.1f})",
        f"  trained {r.trained:,} of {r.parameters:,} parameters; peak memory {r.peak_memory_gb:.2f} GB; "
        f"loss {r.first_loss:.3f} -> {r.last_loss:.3f}",
    ]


def prepare(model: OpenELM, training: Training) -> None:
    """Put a loaded model into training mode: all weights, or adapters beside frozen ones; in place.

    Raises:
        OpenELMError: packed weights cannot be trained themselves.
    """
    if training.method == "lora":
        model.freeze()
        for layer in model.layers:
            for parent, name in (
                (layer.attn, "qkv_proj"),
                (layer.attn, "out_proj"),
                (layer.ffn, "proj_1"),
                (layer.ffn, "proj_2"),
            ):
                setattr(parent, name, LoRA(parent[name], training.rank))
    elif any(hasattr(module, "bits") for module in model.modules()):
        raise OpenELMError(
            "packed weights cannot be trained: use a model in bf16 or fp32, or the method lora, which leaves them alone"
        )
    model.train()


def random_batch(model: OpenELM, training: Training) -> mx.array:
    """``(batch_size, seq_length + 1)`` random ids: each but the last predicts the next one."""
    width = training.seq_length + 1
    ids = prompt_ids(training.batch_size * width, model.config.vocab_size)
    batch = mx.array(ids).reshape(training.batch_size, width)
    mx.eval(batch)
    return batch


def training_step(model: OpenELM) -> Callable[[mx.array], float]:
    """A function that trains on a batch ``(B, L + 1)`` and returns the loss before the update, once it is made."""
    optimizer = AdamW(learning_rate=LEARNING_RATE)
    optimizer.init(
        model.trainable_parameters()
    )  # not in the first step, whose state the compiled function would outgrow
    loss_and_gradients = nn.value_and_grad(model, _loss)
    state = [model.state, optimizer.state]

    @partial(mx.compile, inputs=state, outputs=state)
    def compiled(batch: mx.array) -> mx.array:
        loss, gradients = loss_and_gradients(model, batch)
        optimizer.update(model, gradients)
        return loss

    def step(batch: mx.array) -> float:
        loss = compiled(batch)
        mx.eval(loss, state)
        return float(loss)

    return step


class LoRA(nn.Module):
    """A frozen projection and its trained low-rank update (Hu et al. 2021), which begins at zero."""

    def __init__(self, base: nn.Module, rank: int) -> None:
        super().__init__()
        self.base = base
        outputs, inputs = base.weight.shape
        if hasattr(base, "bits"):  # packed in 32-bit words
            inputs = inputs * 32 // base.bits
        self.lora_a = mx.random.uniform(-1, 1, (inputs, rank)) / math.sqrt(inputs)
        self.lora_b = mx.zeros((rank, outputs))

    def __call__(self, x: mx.array) -> mx.array:
        update = (x @ self.lora_a.astype(x.dtype)) @ self.lora_b.astype(x.dtype)
        return self.base(x) + _SCALE * update


def _loss(model: OpenELM, batch: mx.array) -> mx.array:
    logits = model(batch[:, :-1]).astype(mx.float32)
    return nn.losses.cross_entropy(logits, batch[:, 1:], reduction="mean")


def parameters(model: nn.Module) -> int:
    """Weights of a model, packed ones counted as what they stand for."""
    count = 0
    for module in model.modules():
        for name, array in module.items():
            if not isinstance(array, mx.array) or name.startswith("_"):
                continue
            if not hasattr(module, "bits"):
                count += array.size
            elif name == "weight":
                count += array.size * 32 // module.bits
    return count


def _flat(tree: Any) -> list[tuple[str, mx.array]]:
    flat: list[tuple[str, mx.array]] = tree_flatten(tree)  # type: ignore[assignment]
    return flat
