"""The DPO losses against all logits and MLX's own gradients, and what the model before training says."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from openelm_mlx import device
from openelm_mlx.adapters import adapters_of, switched_off
from openelm_mlx.finetune import losses
from openelm_mlx.finetune.data.batches import batch_of
from openelm_mlx.finetune.data.types import Batch, Encoded
from openelm_mlx.finetune.losses import Arrays, evaluated_states
from openelm_mlx.finetune.preferences import FIGURES, Preferences, pair_losses, response_logps, row_keys
from openelm_mlx.finetune.settings import Settings
from openelm_mlx.finetune.step import Trainer, written_out
from openelm_mlx.model import OpenELM
from openelm_mlx.trees import Tensors, flat, trainable
from tests.finetune.made import distance, examples, model_of
from tests.support.models import golden_model

CLOSE = 5e-5
BETA = 0.3
LENGTHS = [12, 33, 20, 9, 15, 15]
"""Of chosen, rejected, chosen, ... with their prompts."""


@pytest.fixture(params=["written out", pytest.param("compiled", marks=pytest.mark.slow)])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How gradients are computed: as on a CPU, or as on a GPU."""
    monkeypatch.setattr(losses, "LOGITS", 512 * 11)  # several pieces
    if request.param == "compiled":
        monkeypatch.setattr(device, "backend", lambda: "metal")
    elif device.backend() != "cpu":
        pytest.skip("made for the CPU backend")
    return str(request.param)


def rows(lengths: Sequence[int] = LENGTHS, vocab: int = 256) -> list[Encoded]:
    """Responses after prompts of four tokens that pairs share."""
    made = examples(lengths, vocab=vocab)
    for chosen, rejected in zip(made[::2], made[1::2], strict=True):
        rejected.ids[:4] = chosen.ids[:4]
    return [Encoded(e.ids, np.arange(len(e.ids)) >= 4, e.where) for e in made]


def pairs_of(made: Sequence[Encoded]) -> Batch:
    return batch_of([[e] for e in made])


def logps(model: OpenELM, made: Sequence[Encoded]) -> mx.array:
    """Of each response, of all logits."""
    found = []
    for e in made:
        logits = model(mx.array(e.ids[None, :-1]))[0].astype(mx.float32)
        each = mx.take_along_axis(nn.log_softmax(logits), mx.array(e.ids[1:, None]), axis=-1)[:, 0]
        found.append((each * mx.array(e.learn[1:])).sum())
    return mx.stack(found)


def straightforward(model: OpenELM, made: Sequence[Encoded], reference: mx.array, kind: str) -> mx.array:
    """The sum of the pairs' losses, as the papers write them."""
    policy = logps(model, made)
    margin = BETA * ((policy[0::2] - policy[1::2]) - (reference[0::2] - reference[1::2]))
    return (nn.relu(1 - margin) if kind == "hinge" else -nn.log_sigmoid(margin)).sum()


def known(made: Sequence[Encoded], reference: mx.array) -> dict[bytes, float]:
    values: Any = reference.tolist()
    return dict(zip(row_keys(pairs_of(made)), values, strict=True))


def settings(**values: Any) -> Settings:
    return Settings(**{"objective": "dpo", "beta": BETA, "max_grad_norm": 0, "weight_decay": 0, **values})


METHODS: list[tuple[str, str, dict[str, Any]]] = [
    ("tiny-no-glu", "full", {}),
    ("tiny-untied", "full", {}),
    ("tiny-tied", "lora", {"targets": ("qkv_proj", "token_embeddings")}),
    ("tiny-untied", "dora", {"targets": ("proj_1", "lm_head")}),
]


def test_compiled_as_for_a_gpu_it_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "backend", lambda: "metal")
    made = rows()
    reference = logps(golden_model("tiny-no-glu", seed=1), made)
    targets = ("out_proj",)
    model = model_of("tiny-no-glu", targets=targets)
    expected, tree = nn.value_and_grad(model, lambda m: straightforward(m, made, reference, "sigmoid"))(model)
    objective = Preferences("sigmoid", BETA, known(made, reference))
    trainer = Trainer(model_of("tiny-no-glu", targets=targets), settings(), objective)
    sums, found = trainer._gradients(trainer._arrays(pairs_of(made)), 0)
    assert float(sums[0]) == pytest.approx(float(expected), rel=1e-5)
    assert distance(found, flat(tree)) < CLOSE


@pytest.mark.parametrize("kind", ["sigmoid", "hinge"])
@pytest.mark.parametrize(("case", "method", "more"), METHODS)
def test_loss_and_gradients_are_those_of_all_logits(
    way: str, kind: str, case: str, method: str, more: dict[str, Any]
) -> None:
    made = rows()
    # With one pair far beyond a margin of 1, and one where the rejected response is far ahead.
    reference = logps(golden_model(case, seed=1), made) + mx.array([-9.0, 0, 0, 0, 0, -9.0])
    model = model_of(case, method, **more)
    expected, tree = nn.value_and_grad(model, lambda m: straightforward(m, made, reference, kind))(model)
    trainer = Trainer(model_of(case, method, **more), settings(), Preferences(kind, BETA, known(made, reference)))
    batch = pairs_of(made)
    sums, found = trainer._gradients(trainer._arrays(batch), 0)
    mx.eval(sums, found)
    assert float(sums[0]) == pytest.approx(float(expected), rel=1e-5)
    assert distance(found, flat(tree)) < CLOSE
    assert trainer.evaluate(batch)["loss"] == pytest.approx(float(expected), rel=1e-5)


def test_the_hinge_teaches_nothing_of_a_pair_beyond_its_margin(way: str) -> None:
    made = rows()[:2]
    reference = logps(golden_model("tiny-no-glu"), made) + mx.array([-9.0, 0.0])
    trainer = Trainer(model_of("tiny-no-glu", "full"), settings(), Preferences("hinge", BETA, known(made, reference)))
    sums, found = trainer._gradients(trainer._arrays(pairs_of(made)), 0)
    assert float(sums[0]) == 0
    assert all(not mx.any(gradient).item() for gradient in found.values())


def test_figures_by_hand() -> None:
    policy, reference = mx.array([-4.0, -7.0, -9.0, -2.0]), mx.array([-6.0, -6.0, -8.0, -4.0])
    # Rewards at beta 0.5: 1 and -0.5, -0.5 and 1; margins 1.5 and -1.5.
    sums, slopes = pair_losses(policy, reference, kind="sigmoid", beta=0.5)
    figures = dict(zip(FIGURES, np.asarray(sums).tolist(), strict=True))
    assert figures == pytest.approx(
        {
            "loss": math.log1p(math.exp(-1.5)) + math.log1p(math.exp(1.5)),
            "rewards_chosen": 0.5,
            "rewards_rejected": 0.5,
            "margin": 0,
            "accuracy": 1,
            "logps_chosen": -13,
            "logps_rejected": -9,
        }
    )
    push = [0.5 / (1 + math.exp(1.5)), 0.5 / (1 + math.exp(-1.5))]
    assert np.asarray(slopes).tolist() == pytest.approx([-push[0], push[0], -push[1], push[1]])
    sums, slopes = pair_losses(policy, reference, kind="hinge", beta=0.5)
    assert float(sums[0]) == 2.5
    assert np.asarray(slopes).tolist() == [0, 0, -0.5, 0.5]


@pytest.mark.parametrize("kind", ["sigmoid", "hinge"])
def test_a_margin_of_thousands_is_finite(kind: str) -> None:
    sums, slopes = pair_losses(mx.array([-9e4, 0.0]), mx.zeros(2), kind=kind, beta=1.0)
    assert float(sums[0]) == pytest.approx(9e4 + (kind == "hinge"))
    assert np.asarray(slopes).tolist() == [-1, 1]


def test_pairs_count_alike_however_they_lie_in_batches(way: str) -> None:
    made = rows()
    reference = logps(golden_model("tiny-no-glu", seed=1), made)
    results = []
    for parts in ([made], [made[:2], made[2:]]):
        model = model_of("tiny-no-glu")
        trainer = Trainer(model, settings(eps=1e-3), Preferences("sigmoid", BETA, known(made, reference)))
        updates = [trainer.update([pairs_of(part) for part in parts], 1e-2) for _ in range(2)]
        results.append(([(u.figures, u.norm) for u in updates], {n: mx.array(p) for n, p in trainable(model).items()}))
    for (figures, norm), (expected, their_norm) in zip(results[1][0], results[0][0], strict=True):
        assert figures == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert norm == pytest.approx(their_norm, rel=1e-4)
    assert distance(results[1][1], results[0][1]) < 1e-4
    assert results[0][0][1][0]["loss"] < results[0][0][0][0]["loss"]


class TestTheModelBefore:
    def trained(self, method: str) -> tuple[OpenELM, Tensors]:
        made = rows()
        model = model_of("tiny-no-glu", method)
        reference = logps(golden_model("tiny-no-glu"), made)
        trainer = Trainer(model, settings(), Preferences("sigmoid", BETA, known(made, reference)))
        for _ in range(3):
            trainer.update([pairs_of(made)], 1e-2)
        return model, {n: mx.array(p) for n, p in trainable(model).items()}

    @pytest.mark.parametrize("method", ["lora", "dora"])
    def test_adapters_switched_off_leave_the_base(self, way: str, method: str) -> None:
        model, weights = self.trained(method)
        layers = adapters_of(model)
        model.eval()
        batch = pairs_of(rows())

        def found() -> mx.array:
            arrays, on_cpu = Arrays.of(batch, fill_up=True), written_out(model)
            return response_logps(model, evaluated_states(model, arrays, on_cpu=on_cpu), arrays, mx.eval)

        expected = logps(golden_model("tiny-no-glu"), rows())
        with switched_off(model):
            assert mx.allclose(found(), expected, rtol=1e-5)
            assert not adapters_of(model)
        assert not mx.allclose(found(), expected, rtol=1e-3)
        assert adapters_of(model) == layers
        assert {n: p.tolist() for n, p in trainable(model).items()} == {n: p.tolist() for n, p in weights.items()}

    def test_they_are_back_after_an_error(self) -> None:
        model = model_of("tiny-no-glu")
        with pytest.raises(KeyError), switched_off(model):
            raise KeyError
        assert len(adapters_of(model)) == 4 * len(model.layers)


def test_keys_tell_tokens_and_responses_apart_and_nothing_else() -> None:
    made = rows()
    keys = dict(zip((e.where for e in made), row_keys(pairs_of(made)), strict=True))
    assert len(set(keys.values())) == len(made)
    other = pairs_of([made[4], made[5]])
    assert other.ids.shape != pairs_of(made).ids.shape
    assert row_keys(other) == [keys[made[4].where], keys[made[5].where]]
    longer = [Encoded(e.ids, np.arange(len(e.ids)) >= 5, e.where) for e in made]
    last = [Encoded(np.append(e.ids[:-1], e.ids[-1] + 1).astype(np.int32), e.learn, e.where) for e in made]
    for changed in (longer, last):
        assert not set(row_keys(pairs_of(changed))) & set(keys.values())


@pytest.fixture
def torch() -> Iterator[Any]:
    yield pytest.importorskip("torch")


@pytest.mark.reference
@pytest.mark.parametrize("kind", ["sigmoid", "hinge"])
def test_losses_and_slopes_are_pytorchs(kind: str, torch: Any) -> None:
    random = np.random.default_rng(0)
    policy, reference = (random.normal(-40, 9, 64).astype(np.float32) for _ in range(2))
    p, r = torch.tensor(policy, requires_grad=True), torch.tensor(reference)
    margin = 0.1 * ((p[0::2] - p[1::2]) - (r[0::2] - r[1::2]))
    each = torch.relu(1 - margin) if kind == "hinge" else -torch.nn.functional.logsigmoid(margin)
    each.sum().backward()
    sums, slopes = pair_losses(mx.array(policy), mx.array(reference), kind=kind, beta=0.1)
    assert float(sums[0]) == pytest.approx(each.sum().item(), rel=1e-5)
    assert np.allclose(np.asarray(slopes), p.grad.numpy(), atol=1e-6)


def test_a_row_without_a_reference_is_no_silent_zero(tmp_path: Path) -> None:
    made = rows()
    with pytest.raises(KeyError):
        Preferences("sigmoid", BETA, {}).arrays(pairs_of(made), fill_up=False)
