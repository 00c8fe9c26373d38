"""Random weights of a new model."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from openelm_mlx.config import OpenELMConfig
from openelm_mlx.finetune.initialization import initialize
from openelm_mlx.model import OpenELM
from openelm_mlx.trees import Tensors, flat

CONFIG = OpenELMConfig(
    model_dim=96,
    num_transformer_layers=3,
    head_dim=16,
    num_gqa_groups=2,
    qkv_multipliers=(0.5, 1.0),
    ffn_multipliers=(0.5, 4.0),
    ffn_dim_divisor=32,
    vocab_size=700,
    normalize_qk_projections=True,
)


def weights(seed: int) -> Tensors:
    model = OpenELM(CONFIG)
    initialize(model, seed)
    return flat(model.parameters())


@pytest.mark.parametrize(
    ("name", "deviation"),
    [
        ("transformer.token_embeddings.weight", 96**-0.5),
        ("lm_head.weight", 96**-0.5),
        ("transformer.layers.1.attn.qkv_proj.weight", 96**-0.5),
        ("transformer.layers.1.ffn.proj_1.weight", 96**-0.5),
        ("transformer.layers.2.attn.out_proj.weight", 96**-0.5 / 6**0.5),
        ("transformer.layers.2.ffn.proj_2.weight", 96**-0.5 / 6**0.5),
    ],
)
def test_deviations_are_corenets(name: str, deviation: float) -> None:
    values = np.array(weights(0)[name])
    assert values.std() == pytest.approx(deviation, rel=0.03)
    assert abs(values.mean()) < 4 * deviation / values.size**0.5
    assert np.abs(values).max() > 3 * deviation, "normal, not cut off"


def test_norms_are_one() -> None:
    norms = [value for name, value in weights(0).items() if "norm" in name]
    assert len(norms) == 4 * 3 + 1
    assert all(bool(mx.all(value == 1)) for value in norms)


def test_they_are_a_function_of_the_seed() -> None:
    one, same, other = weights(1), weights(1), weights(2)
    assert all(bool(mx.array_equal(one[name], same[name])) for name in one)
    assert not any(bool(mx.array_equal(one[name], other[name])) for name in one if one[name].ndim == 2)


def test_no_two_layers_are_alike() -> None:
    values = weights(0)
    first, second = (values[f"transformer.layers.{n}.attn.qkv_proj.weight"][:32] for n in (0, 1))
    assert abs(float(mx.mean(first * second))) < 0.02 / 96
