"""What a run takes by the estimate, beside what it takes."""

from __future__ import annotations

import gc
from typing import Any

import mlx.core as mx
import pytest

from openelm_mlx import device
from openelm_mlx.config import OpenELMConfig
from openelm_mlx.finetune import memory
from openelm_mlx.finetune.settings import Settings
from openelm_mlx.finetune.step import Trainer
from openelm_mlx.loading import TooLargeError
from openelm_mlx.trees import flat, trainable
from tests.finetune.made import alone, examples, model_of
from tests.support.models import golden_config

SHAPES: list[dict[str, Any]] = [
    {"batch_size": 4, "max_length": 128},
    {"batch_size": 1, "max_length": 512},
    {"batch_size": 4, "max_length": 128, "method": "dora"},
    {"batch_size": 4, "max_length": 128, "method": "full"},
    {"batch_size": 8, "max_length": 128, "gradient_checkpointing": True},
]


def estimate(settings: Settings, config: OpenELMConfig, **values: int) -> memory.Estimate:
    sizes = {"weight_bytes": 1000, "trained": 100, "item": 4, "length": settings.max_length, **values}
    return memory.estimate(config, settings, **sizes)


@pytest.mark.slow
@pytest.mark.skipif(device.backend() != "cpu", reason="counts what a CPU needs")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_estimate_is_near_the_peak(shape: dict[str, Any]) -> None:
    settings = Settings(rank=3, **shape)
    gc.collect()
    before = mx.get_active_memory()
    model = model_of("tiny-tied", settings.method, fast=True)
    weights, trained = sum(p.nbytes for p in flat(model.parameters()).values()), trainable(model)
    trainer = Trainer(model, settings)
    made = examples([settings.max_length + 1] * settings.batch_size, learned=0.5)
    trainer.update([alone(made)], 1e-3)
    mx.reset_peak_memory()
    trainer.update([alone(made)], 1e-3)
    peak = mx.get_peak_memory() - before
    needed = estimate(settings, model.config, weight_bytes=weights, trained=sum(p.size for p in trained.values()))
    assert 0.6 * peak < needed.total < 1.3 * peak, f"{needed.total / peak:.2f}"


def test_what_makes_a_run_larger() -> None:
    config = golden_config("openelm-270m")
    usual = estimate(Settings(max_length=512), config)
    assert estimate(Settings(max_length=256), config).activations == usual.activations / 2
    assert estimate(Settings(max_length=512, batch_size=8), config).activations == usual.activations * 2
    assert estimate(Settings(max_length=512, gradient_checkpointing=True), config).total < 0.5 * usual.total
    assert estimate(Settings(max_length=512), config, item=2).activations == usual.activations / 2
    assert estimate(Settings(max_length=512), config, trained=200).trained == 2 * usual.trained
    assert usual.total == usual.weights + usual.trained + usual.activations + usual.logits
    assert usual.weights == 1000


def test_bfloat16_weights_that_are_trained_have_exact_copies() -> None:
    """A parameter: 2 bytes of gradient, 8 of moments and 4 of copy; 4 of gradient where several batches add up."""
    config = golden_config("tiny-tied")
    both = [
        estimate(Settings(method="full", accumulation=n), config, item=2, trained=trained).trained
        for n in (1, 2)
        for trained in (0, 1000)
    ]
    assert (both[1] - both[0], both[3] - both[2]) == (14_000, 16_000)


def test_a_run_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = memory.Estimate(weights=2_000_000_000, trained=500_000_000, activations=400_000_000, logits=100_000_000)
    for available, fits in ((3_000_000_000, True), (2_999_999_999, False)):
        monkeypatch.setattr(device, "memory", lambda n=available: device.Memory(n, "memory available now"))
        if fits:
            memory.require(needed, Settings(model="base"))
            continue
        with pytest.raises(TooLargeError) as caught:
            memory.require(needed, Settings(model="base", method="full"))
        said = str(caught.value)
        assert said.startswith(
            "base: fine-tuning so needs 3.00 GB (weights 2.00 GB, gradients and optimizer 0.50 GB, "
            "activations 0.40 GB, logits 0.10 GB), and there are 3.00 GB (memory available now); use "
        )
        assert said.endswith("--gradient-checkpointing, --method lora; --force tries all the same")
    monkeypatch.setattr(device, "memory", lambda: None)
    memory.require(needed, Settings())
