"""Ours and mlx-lm's trainer, in this process: the same model, data and work, and what counts as a token."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from openelm_mlx import device
from openelm_mlx.adapters import adapters_of
from openelm_mlx.adapters.layers import LoRALinear
from openelm_mlx.benchmarks import trainers
from openelm_mlx.benchmarks.models import Subject
from openelm_mlx.benchmarks.protocol import WINDOW
from openelm_mlx.benchmarks.trainers import mlxlm, ours
from openelm_mlx.benchmarks.trainers.base import EOS, Step, Training, Tuner, TuningJob
from openelm_mlx.benchmarks.trainers.onmlx import parameters
from openelm_mlx.errors import OpenELMError
from openelm_mlx.finetune.settings import METHODS
from openelm_mlx.model import OpenELM
from tests.support.models import converted_folder, golden_model

BY_LENGTH = Tuner(peer="mlx-lm", by_length=True)


@pytest.fixture(autouse=True)
def uncompiled() -> Iterator[None]:
    """On a CPU every kernel of a compiled step costs its first user half a second of a C++ compiler's time."""
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return Subject("tiny", folder=converted_folder(tmp_path_factory.mktemp("trainers") / "tiny"))


def small(method: str = "lora", **changes: Any) -> Training:
    return Training(**{"method": method, "batch_size": 2, "seq_length": 32, "steps": 3, "rank": 4, **changes})


def job(subject: Subject, training: Training, tuner: Tuner | None = None) -> TuningJob:
    config = subject.config().to_dict()
    return TuningJob(tuner or Tuner(peer="openelm-mlx"), subject.to_json(), config, device.backend(), training)


class Enough(Exception):
    """As many steps as were wanted."""


def steps(loaded: Any, count: int) -> list[Step]:
    made: list[Step] = []

    def turn(step: Step) -> None:
        made.append(step)
        if len(made) == count:
            raise Enough

    with pytest.raises(Enough):
        loaded.run(turn)
    return made


def both(subject: Subject, training: Training) -> list[Any]:
    return [ours.load(job(subject, training)), mlxlm.load(job(subject, training, Tuner(peer="mlx-lm")))]


def weights(model: nn.Module) -> dict[str, mx.array]:
    flat: list[tuple[str, mx.array]] = tree_flatten(model.parameters())  # type: ignore[assignment]
    return {name: mx.array(value) for name, value in flat}


# What is trained.


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_both_train_the_same_parameters(subject: Subject, method: str) -> None:
    own, other = (loaded.about() for loaded in both(subject, small(method)))
    assert (own.trained, own.parameters) == (other.trained, other.parameters)
    c, full = subject.config(), parameters(golden_model("tiny-tied"))
    sides = [
        ((h + 2 * kv) * c.head_dim + c.model_dim) + (h * c.head_dim + c.model_dim) + (3 * ffn + 2 * c.model_dim)
        for h, kv, ffn in zip(c.num_query_heads, c.num_kv_heads, c.ffn_dims, strict=True)
    ]
    if method == "lora":
        assert (own.trained, own.parameters) == (4 * sum(sides), full + 4 * sum(sides))
    if method == "full":
        assert own.trained == own.parameters == full
    assert own.dtype == other.dtype == "float32"


def test_adapters_are_the_librarys_on_the_four_projections_of_every_layer(subject: Subject) -> None:
    model = ours.load(job(subject, small())).trainer.model
    layers = adapters_of(model)
    names = ("attn.qkv_proj", "attn.out_proj", "ffn.proj_1", "ffn.proj_2")
    assert set(layers) == {f"transformer.layers.{n}.{name}" for n in range(len(model.layers)) for name in names}
    assert {(type(layer), layer.scale, layer.lora_a.shape[1]) for layer in layers.values()} == {(LoRALinear, 2.0, 4)}


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_both_begin_with_the_mean_cross_entropy_and_lower_it(subject: Subject, method: str) -> None:
    training = small(method)
    ids = np.array(training.sequences(512))
    logits = np.array(golden_model("tiny-tied")(mx.array(ids[:, :-1])), np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -np.take_along_axis(logprobs, ids[:, 1:, None], axis=-1).mean()
    for loaded in both(subject, training):
        losses = [step.loss for step in steps(loaded, 4)]
        assert losses[0] == pytest.approx(expected, rel=1e-5)
        assert losses == sorted(losses, reverse=True) and losses[0] - losses[-1] > 1e-3


@pytest.mark.parametrize("precision", ["fp32", "4bit"])
def test_adapters_leave_the_model_alone(tmp_path: Path, precision: str) -> None:
    loaded = ours.load(job(Subject("tiny", folder=converted_folder(tmp_path / "m", precision)), small()))
    before = weights(loaded.trainer.model)
    steps(loaded, 2)
    after = weights(loaded.trainer.model)
    base = [name for name in before if ".lora_" not in name]
    assert all(mx.array_equal(before[name], after[name]) for name in base)
    assert all(mx.abs(value).max() > 0 for name, value in after.items() if name.endswith("lora_b"))


def test_packed_weights_cannot_be_trained(tmp_path: Path) -> None:
    with pytest.raises(OpenELMError, match="packed weights cannot be trained"):
        ours.load(job(Subject("tiny", folder=converted_folder(tmp_path / "m", "4bit")), small("full")))


def test_packed_parameters_count_as_what_they_stand_for() -> None:
    model = golden_model("tiny-tied")
    plain = parameters(model)
    assert plain == sum(value.size for value in weights(model).values())
    nn.quantize(model, 32, 4)
    assert parameters(model) == plain


@pytest.mark.parametrize("which", [ours, mlxlm])
def test_a_loss_that_is_no_number_is_refused(subject: Subject, monkeypatch: pytest.MonkeyPatch, which: Any) -> None:
    def broken(*_: object, **__: object) -> OpenELM:
        model = golden_model("tiny-tied")
        model.transformer.norm.weight = mx.full(model.transformer.norm.weight.shape, math.nan)
        return model

    monkeypatch.setattr(which, "load_subject" if which is ours else "model_of", broken)
    with pytest.raises(OpenELMError, match=r"the loss is .*; train in bfloat16 or float32"):
        steps(which.load(job(subject, small("lora"))), 1)


# What counts.


def test_full_batches_have_no_padding(subject: Subject) -> None:
    for loaded in both(subject, small()):
        for step in steps(loaded, 2):
            assert (step.rows, step.length, step.targets) == (2, 32, 64)
            assert step.seconds > 0 and step.process_gb > 0
            assert step.peak_memory_gb * 1e9 > 4 * parameters(golden_model("tiny-tied"))


def test_every_target_of_ragged_data_counts_once_an_epoch(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openelm_mlx.benchmarks.trainers.base._RAGGED_BATCHES", 16)
    training = small(ragged=(2, 12), batch_size=1)
    expected = sum(len(ids) - 1 for ids in training.sequences(512))
    own, other = both(subject, training)
    rows = own.batches.batches_in(1)
    assert rows <= 16 / 2  # several sequences in each
    assert sum(step.targets for step in steps(own, rows)) == expected
    done = steps(other, 16)
    assert sum(step.targets for step in done) == expected
    assert {(step.rows, step.length) for step in done} == {(1, 32)}


def test_mlx_lm_sorts_by_length_only_what_has_lengths(subject: Subject) -> None:
    from mlx_lm.tuner.trainer import iterate_batches

    def spread(tuner: Tuner) -> float:
        data = mlxlm.load(job(subject, small(ragged=(2, 33)), tuner)).data
        batches = iterate_batches(dataset=data, batch_size=2, max_seq_length=33)
        return float(np.mean([np.ptp(np.array(spans[:, 1])) for _, spans in batches]))

    assert spread(BY_LENGTH) < 1
    assert spread(Tuner(peer="mlx-lm")) > 5  # as its command reads JSON Lines


def test_sequences_are_as_long_as_asked_and_end_once() -> None:
    full = small().sequences(512)
    assert [len(ids) for ids in full] == [33, 33]
    ragged = small(ragged=(5, 9)).sequences(512)
    assert {len(ids) for ids in ragged} == {5, 6, 7, 8, 9} and len(ragged) == 128
    assert all(ids.count(EOS) == 1 and ids[-1] == EOS and max(ids) < 512 for ids in full + ragged)
    assert ragged == small(ragged=(5, 9)).sequences(512)
    assert all(a != b for a, b in pairwise(ragged))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "some"}, "method must be one of lora, dora, full"),
        ({"batch_size": 0}, "batch_size"),
        ({"steps": True}, "steps"),
        ({"rank": 1.5}, "rank"),
        ({"seq_length": WINDOW + 1}, "window of 2048"),
        ({"ragged": (1, 9)}, "ragged must be two lengths, from 2 to 33"),
        ({"ragged": (9, 8)}, "not 9-8"),
        ({"ragged": (9, 34)}, "not 9-34"),
    ],
)
def test_wrong_options_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OpenELMError, match=message):
        small(**changes)


# Who takes part.


def names(compare: list[str], training: Training, backend: str) -> list[str]:
    return [tuner.name for tuner in trainers.tuners(compare, training, backend)[0]]


@pytest.mark.skipif(sys.platform != "linux", reason="a BLAS is chosen on Linux")
def test_on_a_cpu_the_blas_can_be_the_same() -> None:
    every, ragged = list(trainers.COMPARED), small(ragged=(2, 9))
    same = "mlx-lm (float32, same BLAS)"
    assert names(every[:2], small(), "cpu") == ["openelm-mlx", "mlx-lm", same]
    assert names(every, ragged, "cpu")[2:] == [same, "mlx-lm (float32, same BLAS, sorted)"]
    assert [t.preloads for t in trainers.tuners(every, ragged, "cpu")[0]] == [True, False, True, True]


def test_on_a_gpu_there_is_none_to_choose() -> None:
    every, ragged = list(trainers.COMPARED), small(ragged=(2, 9))
    assert names(every, ragged, "metal") == ["openelm-mlx", "mlx-lm", "mlx-lm (sorted)"]
    assert trainers.tuners(every, ragged, "metal")[1] == [
        "mlx-lm-blas: left out: there is no BLAS to choose here; compare with mlx-lm"
    ]


def test_who_is_not_there_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainers, "find_spec", lambda name: None)
    found, lines = trainers.tuners(["mlx-lm"], small(), "cpu")
    assert [t.name for t in found] == ["openelm-mlx"]
    assert lines == ["mlx-lm: left out: it is not installed (pip install mlx-lm)"]


def test_sorting_full_batches_is_refused() -> None:
    with pytest.raises(OpenELMError, match="mlx-lm-sorted goes with --ragged"):
        trainers.tuners(["mlx-lm-sorted"], small(), "cpu")


def test_jobs_travel_as_json(subject: Subject) -> None:
    for training in (small(), small(ragged=(2, 9))):
        sent = job(subject, training, BY_LENGTH)
        assert TuningJob.from_json(json.loads(json.dumps(sent.to_json()))) == sent
