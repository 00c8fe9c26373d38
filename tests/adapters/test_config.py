"""What an adapter can be, and which layers its targets name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from openelm_mlx.adapters import LINEARS, AdapterConfig, AdapterError, find_targets
from openelm_mlx.errors import OpenELMError
from openelm_mlx.model import OpenELM
from tests.support.models import golden_config

LAYERS = "transformer.layers."


@pytest.fixture(scope="module")
def model() -> OpenELM:
    """Three layers, untied; not filled."""
    return OpenELM(golden_config("tiny-untied"))


def test_scale() -> None:
    assert AdapterConfig(rank=8, alpha=16).scale == 2
    assert AdapterConfig(rank=16, alpha=8, rslora=True).scale == 8 / math.sqrt(16)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method": "full"}, "method must be one of lora, dora, not 'full'"),
        ({"rank": 0}, "rank must be a whole number, 1 or more, not 0"),
        ({"rank": 8.0}, "rank must be a whole number"),
        ({"rank": True}, "rank must be a whole number"),
        ({"rank": 10**400}, "rank must be at most 1048576, not 1000"),
        ({"alpha": 10**400}, "alpha must be a number above 0, not 1000"),
        ({"alpha": 1e-320}, "alpha gives a scale of "),
        ({"alpha": 1e300}, "alpha gives a scale of 1.25e+299, not one of 1e-30 to 1e+30"),
        ({"alpha": 0}, "alpha must be a number above 0, not 0"),
        ({"alpha": math.inf}, "alpha must be a number above 0"),
        ({"alpha": "16"}, "alpha must be a number above 0"),
        ({"dropout": 1}, "dropout must be a number from 0 to below 1, not 1"),
        ({"dropout": -0.1}, "dropout must be a number"),
        ({"dropout": math.nan}, "dropout must be a number"),
        ({"targets": ()}, "targets must be names of layers, at least one"),
        ({"targets": ("",)}, "targets must be names of layers"),
        ({"layers": "some"}, "layers must be all, a range such as"),
        ({"layers": "3-1"}, "layers must be all"),
        ({"layers": "last-0"}, "layers must be all"),
        ({"layers": ""}, "layers must be all"),
        ({"layers": 3}, "layers must be all"),
    ],
)
def test_values_out_of_range(values: dict[str, Any], message: str) -> None:
    with pytest.raises(OpenELMError) as error:
        AdapterConfig(**values)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_names_in_the_models_order(model: OpenELM) -> None:
    assert find_targets(model, ("proj_2", "qkv_proj")) == [
        f"{LAYERS}{n}.{name}" for n in range(3) for name in ("attn.qkv_proj", "ffn.proj_2")
    ]
    assert len(find_targets(model, LINEARS)) == 4 * 3
    assert find_targets(model, ("lm_head", "token_embeddings")) == ["transformer.token_embeddings", "lm_head"]


def test_part_of_a_path_and_regular_expressions(model: OpenELM) -> None:
    assert find_targets(model, ("ffn.proj_1",)) == [f"{LAYERS}{n}.ffn.proj_1" for n in range(3)]
    assert find_targets(model, (r".*layers\.[02]\.attn\..*",)) == [
        f"{LAYERS}{n}.attn.{name}" for n in (0, 2) for name in ("qkv_proj", "out_proj")
    ]
    with pytest.raises(AdapterError, match="matches no layer"):
        find_targets(model, ("proj",))  # the end of no name: proj_1 is another one


@pytest.mark.parametrize(
    ("layers", "expected"),
    [("all", [0, 1, 2]), ("1", [1]), ("0,2", [0, 2]), ("1-2", [1, 2]), ("0, 1-2", [0, 1, 2]), ("last-2", [1, 2])],
)
def test_a_range_of_layers(model: OpenELM, layers: str, expected: list[int]) -> None:
    found = find_targets(model, ("proj_1", "lm_head"), layers)
    assert found == [*(f"{LAYERS}{n}.ffn.proj_1" for n in expected), "lm_head"]


@pytest.mark.parametrize(
    ("targets", "layers", "message"),
    [
        (
            ("q_proj",),
            "all",
            "targets: 'q_proj' matches no layer; the names there are: "
            "token_embeddings, qkv_proj, out_proj, proj_1, proj_2, lm_head",
        ),
        (("q_norm",), "all", "matches no layer"),
        ((r".*\.0\.ffn\.proj_1",), "1-2", "matches no layer in layers 1-2"),
        (("(.+)+!",), "all", "targets: '(.+)+!' repeats a group that has a repetition in it"),
        (("x" * 201,), "all", "is too long for a layer's name or a pattern: over 200 characters"),
        (("qkv_proj", "(",), "all", "targets: '(' is neither a layer's name nor a regular expression"),
        (("qkv_proj",), "3", "layers: there is no layer 3; the model has 3, from 0 to 2"),
        (("qkv_proj",), "last-4", "layers: last-4 of a model that has 3 layers"),
    ],
)  # fmt: skip
def test_what_matches_nothing(model: OpenELM, targets: tuple[str, ...], layers: str, message: str) -> None:
    with pytest.raises(AdapterError) as error:
        find_targets(model, targets, layers)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
