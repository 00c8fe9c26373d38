"""The written-out backward pass of a CPU: MLX's own gradients, for every kind of model and of trained parameters."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest

from openelm_mlx import device
from openelm_mlx.finetune.losses import Arrays, NextToken, cpu_sums_and_gradients, sums_alone
from openelm_mlx.model import OpenELM
from openelm_mlx.trees import Tensors, trainable
from tests.finetune.made import alone, batch_of, distance, examples, model_of, stock_gradients

pytestmark = pytest.mark.skipif(device.backend() != "cpu", reason="made for the CPU backend")

CASES = ["tiny-tied", "tiny-untied", "tiny-no-qk-norm", "tiny-no-glu"]
CLOSE = 2e-5
EVERYTHING = ("qkv_proj", "out_proj", "proj_1", "proj_2", "token_embeddings")

LENGTHS = [33, 7, 2, 20]
ROWS = [[0, 1], [2, 3]]


def gradients(model: OpenELM, batch: Arrays, *, seed: int = 0, recompute: bool = False) -> tuple[float, Tensors]:
    loss, found = cpu_sums_and_gradients(model, batch, NextToken(), seed, recompute=recompute)
    return float(loss), found


def check(model: OpenELM, plain: OpenELM, *, recompute: bool = False, learned: float = 0.6) -> None:
    """Packed and one a row, against each document alone."""
    made = examples(LENGTHS, learned=learned)
    loss, expected = stock_gradients(plain, made)
    assert expected.keys() == trainable(model).keys()
    before = trainable(model)
    for batch in (alone(made), batch_of([[made[n] for n in row] for row in ROWS], width=64)):
        found, ours = gradients(model, Arrays.of(batch, fill_up=False), recompute=recompute)
        assert found == pytest.approx(loss, rel=1e-5)
        assert distance(ours, expected) < CLOSE
    after = trainable(model)
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before), "the model's own parameters are back in their places"


class TestGradients:
    @pytest.mark.parametrize("method", ["lora", "dora", "full"])
    @pytest.mark.parametrize("case", CASES)
    def test_are_those_of_mlx(self, case: str, method: str) -> None:
        check(model_of(case, method, fast=True), model_of(case, method))

    @pytest.mark.parametrize("case", ["tiny-tied", "tiny-untied"])
    def test_of_an_embedding_adapter(self, case: str) -> None:
        check(model_of(case, targets=EVERYTHING, fast=True), model_of(case, targets=EVERYTHING))

    def test_of_an_adapted_head(self) -> None:
        targets = ("qkv_proj", "lm_head")
        check(model_of("tiny-untied", targets=targets, fast=True), model_of("tiny-untied", targets=targets))

    @pytest.mark.parametrize("target", ["qkv_proj", "out_proj", "proj_1", "proj_2"])
    def test_of_a_single_kind_of_layer(self, target: str) -> None:
        check(model_of("tiny-tied", targets=(target,), fast=True), model_of("tiny-tied", targets=(target,)))

    @pytest.mark.parametrize("layers", ["last-1", "0", "1-2"])
    def test_of_a_part_of_the_layers(self, layers: str) -> None:
        check(model_of("tiny-tied", layers=layers, fast=True), model_of("tiny-tied", layers=layers))

    @pytest.mark.parametrize("names", [["norm"], ["q_norm"], ["k_norm"], ["attn_norm"], ["token_embeddings"]])
    def test_of_single_parameters(self, names: list[str]) -> None:
        models = [model_of("tiny-tied", "full", fast=fast) for fast in (True, False)]
        for model in models:
            model.freeze()
            for path, module in model.named_modules():
                if path.rpartition(".")[2] in names:
                    module.unfreeze(recurse=False)
        check(*models)

    def test_of_a_packed_base(self) -> None:
        models = [model_of("tiny-tied", "full", fast=fast) for fast in (True, False)]
        from openelm_mlx.adapters import AdapterConfig, attach

        for model in models:
            nn.quantize(model, group_size=32, bits=4, class_predicate=lambda path, m: isinstance(m, nn.Linear))
            attach(model, AdapterConfig(rank=3, alpha=6))
        check(*models)

    @pytest.mark.parametrize("method", ["lora", "dora", "full"])
    def test_with_everything_learned(self, method: str) -> None:
        """Then hidden states are not picked out of their rows."""
        made = examples([33, 33])
        loss, expected = stock_gradients(model_of("tiny-tied", method), made)
        found, ours = gradients(model_of("tiny-tied", method, fast=True), Arrays.of(alone(made), fill_up=False))
        assert found == pytest.approx(loss, rel=1e-5)
        assert distance(ours, expected) < CLOSE

    @pytest.mark.parametrize("method", ["lora", "dora", "full"])
    def test_computed_again_they_are_the_same_to_the_bit(self, method: str) -> None:
        batch = Arrays.of(alone(examples(LENGTHS)), fill_up=False)
        dropout = 0.0 if method == "full" else 0.3
        model = model_of("tiny-tied", method, dropout=dropout, fast=True)
        kept, again = (gradients(model, batch, seed=3, recompute=recompute) for recompute in (False, True))
        assert kept[0] == again[0]
        assert all(mx.array_equal(kept[1][name], again[1][name]) for name in kept[1])


class TestDropout:
    def test_is_a_function_of_the_seed(self) -> None:
        model = model_of("tiny-tied", dropout=0.3, fast=True)
        batch = Arrays.of(alone(examples(LENGTHS)), fill_up=False)
        losses = [gradients(model, batch, seed=seed)[0] for seed in (1, 2, 1)]
        assert losses[0] == losses[2] != losses[1]

    @pytest.mark.parametrize("recompute", [False, True])
    @pytest.mark.parametrize("targets", [EVERYTHING[:4], ("token_embeddings",)])
    def test_the_gradient_is_that_of_the_loss_with_the_same_dropout(
        self, targets: tuple[str, ...], recompute: bool
    ) -> None:
        """By differences along the gradient itself: only if both passes hide the same do they agree."""
        model = model_of("tiny-tied", targets=targets, dropout=0.5, fast=True)
        batch = Arrays.of(alone(examples(LENGTHS)), fill_up=False)
        _, found = gradients(model, batch, seed=5, recompute=recompute)
        own = trainable(model)
        length = mx.sqrt(mx.stack([mx.square(g).sum() for g in found.values()]).sum()).item()
        step = 2e-4 / length  # an embedding's effect is curved: its vectors are small, and normalized
        losses = []
        for sign in (1, -1):
            moved = [(name, own[name] + sign * step * found[name]) for name in own]
            model.load_weights(moved, strict=False)
            losses.append(gradients(model, batch, seed=5)[0])
        assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(length**2, rel=0.02)

    def test_is_off_in_an_evaluation(self) -> None:
        made = examples(LENGTHS, learned=0.5)
        model = model_of("tiny-tied", dropout=0.5, fast=True)
        model.eval()
        loss = float(sums_alone(model, Arrays.of(alone(made), fill_up=False), NextToken(), on_cpu=True))
        assert loss == pytest.approx(stock_gradients(model_of("tiny-tied"), made)[0], rel=1e-5)


def test_less_memory_when_layers_are_computed_again() -> None:
    batch = Arrays.of(alone(examples([129] * 4)), fill_up=False)
    model = model_of("tiny-tied", fast=True)
    peaks = []
    for recompute in (False, True):
        mx.reset_peak_memory()
        gradients(model, batch, recompute=recompute)
        peaks.append(mx.get_peak_memory())
    assert peaks[1] < 0.8 * peaks[0]
