"""Models with equal layers and as many parameters."""

from __future__ import annotations

import pytest

from openelm_mlx.config import PRESETS, OpenELMConfig
from openelm_mlx.model import OpenELM
from openelm_mlx.trees import trainable
from openelm_mlx.uniform import uniform
from tests.support.models import golden_config

CASES = ["tiny-tied", "tiny-untied", "tiny-no-glu", "tiny-no-qk-norm"]


@pytest.mark.parametrize("name", [*CASES, *PRESETS])
def test_parameters_are_those_of_the_model(name: str) -> None:
    config = OpenELMConfig.preset(name) if name in PRESETS else golden_config(name)
    assert config.parameters == sum(p.size for p in trainable(OpenELM(config)).values())


@pytest.mark.parametrize(("name", "heads", "width"), [("OpenELM-270M", 16, 2816), ("OpenELM-3B", 20, 6656)])
def test_a_uniform_model_has_as_many_parameters(name: str, heads: int, width: int) -> None:
    config = OpenELMConfig.preset(name)
    equal = uniform(config)
    assert set(equal.num_query_heads) == {heads}
    assert set(equal.ffn_dims) == {width}
    assert set(equal.num_kv_heads) == {heads // 4}
    assert abs(equal.parameters / config.parameters - 1) < 0.02
    kept = ("model_dim", "num_transformer_layers", "head_dim", "vocab_size", "max_context_length")
    assert all(getattr(equal, key) == getattr(config, key) for key in kept)
    assert OpenELMConfig.from_dict(equal.to_dict()) == equal


def test_a_uniform_models_uniform_one_is_itself() -> None:
    equal = uniform(OpenELMConfig.preset("OpenELM-450M"))
    assert uniform(equal) == equal
