"""Random weights of a new model."""

from __future__ import annotations

import mlx.core as mx

from openelm_mlx.errors import OpenELMError
from openelm_mlx.layer_paths import EMBEDDING
from openelm_mlx.model import OpenELM
from openelm_mlx.trees import flat, nested

_LAST = ("out_proj.weight", "ffn.proj_2.weight")
"""The projections whose output is added to the residual stream."""


def initialize(model: OpenELM, seed: int) -> None:
    """Give a model new weights, float32: a function of its sizes and the seed.

    Normal ones: of a projection with a standard deviation of ``in_features ** -0.5``, of the embedding of
    ``model_dim ** -0.5``, and of the last projection of attention and feed-forward network of
    ``model_dim ** -0.5 * (2 * layers) ** -0.5``, as in OPT (Zhang et al. 2022). Norms are 1. Source: `reset_parameters`
    of CoreNet's general_gpt.py.
    """
    config = model.config
    weights = flat(model.parameters())
    keys = mx.random.split(mx.random.key(seed), len(weights))
    made = {}
    for key, (name, old) in zip(keys, weights.items(), strict=True):
        if old.ndim == 1:
            made[name] = mx.ones(old.shape)
            continue
        if old.ndim != 2:
            raise OpenELMError(f"{name}: a new model has no parameters of {old.ndim} dimensions")
        fan = config.model_dim if name == f"{EMBEDDING}.weight" or name.endswith(_LAST) else old.shape[1]
        deviation = fan**-0.5
        if name.endswith(_LAST):
            deviation *= (2 * config.num_transformer_layers) ** -0.5
        made[name] = mx.random.normal(old.shape, scale=deviation, key=key)
    model.update(nested(made))
    mx.eval(model.parameters())
