"""The decoder with equal layers that a layer-wise scaled one is compared to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from openelm_mlx.config import OpenELMConfig
from openelm_mlx.scaling import make_divisible


def count_parameters(config: OpenELMConfig) -> int:
    """All parameters of a model, tied ones once."""
    heads = sum(h + kv for h, kv in zip(config.num_query_heads, config.num_kv_heads, strict=True))
    projections = 2 * heads * config.head_dim  # queries and the output; keys and values
    inside = (3 if config.ffn_with_glu else 2) * sum(config.ffn_dims)
    norms = 2 * config.num_transformer_layers + 1
    per_head = 2 * config.num_transformer_layers * config.head_dim if config.normalize_qk_projections else 0
    tables = config.vocab_size * (1 if config.share_input_output_layers else 2)
    return config.model_dim * (projections + inside + norms + tables) + per_head


def uniform(config: OpenELMConfig) -> OpenELMConfig:
    """A model with the same width, depth and vocabulary whose layers are all alike, of as many parameters as can be.

    It is what the paper's section 2.1 sets layer-wise scaling against. The heads are the layers' mean, in whole groups;
    the feed-forward width is what comes nearest in parameters.
    """
    layers = config.num_transformer_layers
    group = max(h // kv for h, kv in zip(config.num_query_heads, config.num_kv_heads, strict=True))
    heads = make_divisible(sum(config.num_query_heads) / layers, group)
    wanted = count_parameters(config)
    return min(_candidates(config, heads, heads // group), key=lambda c: abs(count_parameters(c) - wanted))


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
