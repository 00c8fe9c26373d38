"""Batches and models for tests of training, and the gradients that stock MLX has for them, document by document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from openelm_mlx.adapters import AdapterConfig, attach
from openelm_mlx.adapters.config import LINEARS
from openelm_mlx.cpu.layers import speed_up
from openelm_mlx.finetune.data.types import Batch, Encoded
from openelm_mlx.model import OpenELM
from openelm_mlx.trees import Tensors, flat, trainable
from tests.support.models import golden_model


def examples(lengths: Sequence[int], *, vocab: int = 256, seed: int = 0, learned: float = 1.0) -> list[Encoded]:
    """Random tokens; about `learned` of them are targets, the last one always."""
    random = np.random.default_rng(seed)
    made = []
    for n, length in enumerate(lengths):
        learn = random.random(length) < learned
        learn[0], learn[-1] = False, True
        made.append(Encoded(random.integers(3, vocab, length).astype(np.int32), learn, f"made:{n + 1}"))
    return made


def batch_of(rows: Sequence[Sequence[Encoded]], width: int | None = None) -> Batch:
    """These examples in these rows, `width` long or as long as they need."""
    sizes = tuple(tuple(len(e.ids) - 1 for e in row) for row in rows)
    shape = (len(rows), width or max(map(sum, sizes)))
    ids, following, learn = np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.bool_)
    for r, row in enumerate(rows):
        used = sum(sizes[r])
        ids[r, :used] = np.concatenate([e.ids[:-1] for e in row])
        following[r, :used] = np.concatenate([e.ids[1:] for e in row])
        learn[r, :used] = np.concatenate([e.learn[1:] for e in row])
    places = np.flatnonzero(learn).astype(np.int32)
    where = tuple(e.where for row in rows for e in row)
    return Batch(ids, sizes, places, following.reshape(-1)[places], where)


def alone(made: Sequence[Encoded]) -> Batch:
    """One example a row."""
    return batch_of([[e] for e in made])


def model_of(
    case: str,
    method: str = "lora",
    *,
    targets: Sequence[str] = LINEARS,
    layers: str = "all",
    dropout: float = 0.0,
    fast: bool = False,
    dtype: mx.Dtype = mx.float32,
) -> OpenELM:
    """A golden model to be trained, adapters of which change something; `fast`: as it is loaded for a CPU."""
    model = golden_model(case)
    if fast:
        speed_up(model)
    model.set_dtype(dtype)
    if method != "full":
        config = AdapterConfig(method=method, rank=3, alpha=6, targets=tuple(targets), layers=layers, dropout=dropout)
        attach(model, config)
        keys = mx.random.split(mx.random.key(7), len(trainable(model)))
        moved = {
            name: p + 0.05 * mx.random.normal(p.shape, key=key)
            for (name, p), key in zip(trainable(model).items(), keys, strict=True)
        }
        model.load_weights(list(moved.items()), strict=False)
    model.train()
    return model


def stock_gradients(model: OpenELM, made: Sequence[Encoded]) -> tuple[float, Tensors]:
    """The summed loss and its gradients as MLX has them: each document alone, all logits, its own cross entropy."""

    def loss(model: OpenELM) -> mx.array:
        total = mx.array(0.0)
        for e in made:
            logits = model(mx.array(e.ids[None, :-1]))[0].astype(mx.float32)
            losses: Any = nn.losses.cross_entropy(logits, mx.array(e.ids[1:]))
            total = total + (losses * mx.array(e.learn[1:])).sum()
        return total

    value, tree = nn.value_and_grad(model, loss)(model)
    return float(value), flat(tree)


def distance(a: Tensors, b: Tensors) -> float:
    """Largest difference, beside the largest value of the same array."""
    assert a.keys() == b.keys()
    return max(
        float(mx.abs(a[n].astype(mx.float32) - b[n].astype(mx.float32)).max() / (mx.abs(b[n]).max() + 1e-6)) for n in b
    )
