"""The decoder with equal layers that a layer-wise scaled one is compared to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from openelm_mlx.config import OpenELMConfig
from openelm_mlx.scaling import make_divisible


def uniform(config: OpenELMConfig) -> OpenELMConfig:
    """A model with the same width, depth and vocabulary whose layers are all alike, of as many parameters as can be.

    It is what the paper's section 2.1 sets layer-wise scaling against. The heads are the layers' mean, in whole groups;
    the feed-forward width is what comes nearest in parameters.
    """
    layers = config.num_transformer_layers
    group = max(h // kv for h, kv in zip(config.num_query_heads, config.num_kv_heads, strict=True))
    heads = make_divisible(sum(config.num_query_heads) / layers, group)
    candidates = _candidates(config, heads, heads // group)
    return min(candidates, key=lambda candidate: abs(candidate.parameters - config.parameters))


def _candidates(config: OpenELMConfig, heads: int, kv_heads: int) -> Iterator[OpenELMConfig]:
    layers, divisor = config.num_transformer_layers, config.ffn_dim_divisor
    for width in range(divisor, max(config.ffn_dims) + 1, divisor):
        yield replace(
            config,
            qkv_multipliers=None,
            num_query_heads=(heads,) * layers,
            num_kv_heads=(kv_heads,) * layers,
            num_gqa_groups=None,
            ffn_multipliers=width / config.model_dim,
        )
