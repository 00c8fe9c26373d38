"""Adapters in a whole model: what is trained, what is left alone, and that they come out again."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from openelm_mlx.adapters import (
    AdapterConfig,
    AdapterError,
    adapter_tensors,
    adapters_of,
    attach,
    attach_adapter,
    detach,
    find_targets,
)
from openelm_mlx.cache import make_cache
from openelm_mlx.model import OpenELM
from tests.adapters.made import IDS, LINEARS_AND_EMBEDDING, array, logits, train, trained_adapter
from tests.support.models import GLU_CASES, golden_model


def flat(tree: Any) -> dict[str, mx.array]:
    pairs: Any = tree_flatten(tree)
    return dict(pairs)


def names(tree: Any) -> list[str]:
    return list(flat(tree))


@pytest.mark.parametrize("method", ["lora", "dora"])
@pytest.mark.parametrize("case", [*GLU_CASES, "tiny-no-glu"])
def test_attach_train_detach(case: str, method: str) -> None:
    model = golden_model(case)
    before, parameters = logits(model), names(model.parameters())
    config = AdapterConfig(method=method, rank=4, targets=LINEARS_AND_EMBEDDING)
    paths = attach(model, config)
    assert paths == find_targets(golden_model(case), LINEARS_AND_EMBEDDING) == list(adapters_of(model))
    np.testing.assert_allclose(logits(model), before, atol=3e-5)
    for layer in adapters_of(model).values():
        train(layer)
    changed = logits(model)
    assert np.abs(changed - before).max() > 0.1
    tensors = adapter_tensors(model)
    assert sorted(names(model.trainable_parameters())) == sorted(tensors)
    parts = ["lora_a", "lora_b", "m"] if method == "dora" else ["lora_a", "lora_b"]
    assert [n.rpartition(".")[2] for n in tensors if ".0.ffn.proj_1." in n] == parts
    cache: Any = make_cache(model)
    steps = [model(mx.array([[token]]), cache=cache) for token in IDS]
    np.testing.assert_allclose(array(mx.concatenate(steps, axis=1)[0]), changed, atol=5e-5)
    detach(model)
    np.testing.assert_array_equal(logits(model), before)
    assert names(model.parameters()) == parameters


def test_all_that_is_not_an_adapter_is_frozen() -> None:
    model = golden_model("tiny-tied")
    attach(model, AdapterConfig(targets=("out_proj",), layers="last-1"))
    model.train()
    assert names(model.trainable_parameters()) == [
        f"transformer.layers.3.attn.out_proj.{part}" for part in ("lora_a", "lora_b")
    ]


def test_an_embedding_adapter_leaves_a_tied_head_alone() -> None:
    """The same update on an untied copy, whose head is the old weight, gives the same logits."""
    tied = golden_model("tiny-tied")
    untied = OpenELM(dataclasses.replace(tied.config, share_input_output_layers=False))
    shared = flat(tied.parameters())
    untied.load_weights([*shared.items(), ("lm_head.weight", shared["transformer.token_embeddings.weight"])])
    before = logits(tied)
    np.testing.assert_allclose(logits(untied), before, atol=1e-6)
    adapter = trained_adapter(tied, targets=("token_embeddings",))
    attach_adapter(tied, adapter, "x")
    table = untied.transformer.token_embeddings
    a, b = (adapter.tensors[f"transformer.token_embeddings.{part}"] for part in ("lora_a", "lora_b"))
    table.weight = table.weight + adapter.config.scale * a @ b
    np.testing.assert_allclose(logits(tied), logits(untied), atol=2e-5)
    assert np.abs(logits(tied) - before).max() > 0.05


def test_each_layer_has_its_own_beginning_and_the_seed_repeats_it() -> None:
    def beginnings(seed: int) -> dict[str, mx.array]:
        model = golden_model("tiny-tied")
        attach(model, AdapterConfig(targets=("proj_1",)), seed=seed)
        return {name: value for name, value in adapter_tensors(model).items() if name.endswith("lora_a")}

    one, same, other = beginnings(1), beginnings(1), beginnings(2)
    assert all(mx.array_equal(one[name], same[name]) for name in one)
    assert not any(mx.array_equal(one[name], other[name]) for name in one)
    first, second, *_ = one.values()
    assert not mx.array_equal(first, second)


def test_the_global_random_state_is_left_alone() -> None:
    mx.random.seed(4)
    expected = mx.random.normal((3,))
    model = golden_model("tiny-tied")
    mx.random.seed(4)
    attach(model, AdapterConfig(method="dora", targets=LINEARS_AND_EMBEDDING))
    mx.eval(model.parameters())
    assert mx.array_equal(mx.random.normal((3,)), expected)


def test_what_dora_needs_of_the_base_is_there_and_not_lazy() -> None:
    model = golden_model("tiny-tied")
    attach(model, AdapterConfig(method="dora"))
    for layer in adapters_of(model).values():
        graph = io.StringIO()
        mx.export_to_dot(graph, layer._base_square)
        assert "Square" not in graph.getvalue()


@pytest.mark.parametrize("training", [True, False])
def test_new_layers_are_in_the_models_mode(training: bool) -> None:
    model = golden_model("tiny-tied")
    model.train(training)
    attach(model, AdapterConfig(dropout=0.5))
    assert {layer.dropout.training for layer in adapters_of(model).values()} == {training}


def test_one_adapter_at_a_time() -> None:
    model = golden_model("tiny-tied")
    attach(model, AdapterConfig())
    with pytest.raises(AdapterError, match="the model has adapters already; take them out first"):
        attach(model, AdapterConfig())
    detach(model)
    attach(model, AdapterConfig())


def test_nothing_is_changed_when_a_target_matches_nothing() -> None:
    model = golden_model("tiny-tied")
    before = names(model.trainable_parameters())
    with pytest.raises(AdapterError, match="'q_proj' matches no layer"):
        attach(model, AdapterConfig(targets=("qkv_proj", "q_proj")))
    assert (adapters_of(model), names(model.trainable_parameters())) == ({}, before)
