"""The loop: losses that are not finite, the best and when to end, signals in every place."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from openelm_mlx.finetune import job
from openelm_mlx.finetune.run_folder import RunFolder
from openelm_mlx.finetune.settings import Settings
from openelm_mlx.finetune.step import NotFinite, Trainer
from openelm_mlx.finetune.trainer import Plan, Stopped
from openelm_mlx.finetune.watching import Metrics, Watchers
from tests.finetune.runs import listing, metrics, updates


def settings(model: Path, data: Path, **values: Any) -> Settings:
    small: dict[str, Any] = {
        "model": str(model),
        "data": str(data),
        "max_length": 24,
        "batch_size": 2,
        "packing": "off",
        "valid_fraction": 0.25,
        "rank": 2,
        "steps": 8,
        "eval_every": 2,
        "plot": False,
    }
    return Settings(**{**small, **values})


class Told(Watchers):
    """Hears everything, and does something at a moment."""

    def __init__(self) -> None:
        super().__init__(())
        self.said: list[str] = []
        self.steps: list[int] = []
        self.evaluated: list[tuple[int, int]] = []

    def say(self, line: str) -> None:
        self.said.append(line)

    def step(self, metrics: Metrics) -> None:
        self.steps.append(metrics["step"])

    def validating(self, done: int, total: int) -> None:
        self.evaluated.append((done, total))


class Signals(Told):
    """Sends this process a signal at an update or in the middle of a validation."""

    def __init__(self, *, update: int = 0, evaluation: int = 0) -> None:
        super().__init__()
        self.update, self.evaluation = update, evaluation

    def step(self, metrics: Metrics) -> None:
        super().step(metrics)
        if metrics["step"] == self.update:
            os.kill(os.getpid(), signal.SIGTERM)

    def validating(self, done: int, total: int) -> None:
        super().validating(done, total)
        if len(self.evaluated) == self.evaluation:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "done"),
    [({"update": 3}, 3), ({"update": 8}, 8), ({"evaluation": 1}, 0), ({"evaluation": 4}, 2)],
)
def test_stopped_anywhere_it_goes_on_the_same(
    moment: dict[str, int], done: int, model: Path, data: Path, tmp_path: Path
) -> None:
    chosen = settings(model, data, dropout=0.1)
    job.finetune(chosen, tmp_path / "whole")
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped) as stopped:
        job.finetune(chosen, tmp_path / "run", watcher=Signals(**moment))
    assert stopped.value.signum == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
    told = Told()
    outcome = job.resume(tmp_path / "run", watcher=told)
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert outcome.state.step == 8
    assert told.steps == list(range(done + 1, 9))


class TestNotFinite:
    def test_it_names_step_examples_and_checkpoint(
        self, model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        update = Trainer.update

        def poisoned(self: Trainer, *given: Any) -> Any:
            if self.optimizer.steps == 5:
                self.model.transformer.norm.weight *= math.nan
            return update(self, *given)

        monkeypatch.setattr(Trainer, "update", poisoned)
        out = tmp_path / "run"
        with pytest.raises(NotFinite) as caught:
            job.finetune(settings(model, data, save_every=2), out)
        said = str(caught.value)
        assert said.startswith(f"step 6: the loss is not finite; its examples: {data}:")
        assert f"the last good checkpoint is {out / 'checkpoints' / 'step-000004'}, and nothing was overwritten" in said
        assert "\n" not in said
        assert listing(out / "checkpoints") == ["step-000002", "step-000004"]
        assert [line["step"] for line in updates(metrics(out))] == [1, 2, 3, 4, 5]
        monkeypatch.undo()
        assert job.resume(out).state.step == 8

    def test_a_huge_learning_rate(self, model: Path, data: Path, tmp_path: Path) -> None:
        chosen = settings(
            model, data, learning_rate=1e30, schedule="constant", warmup_steps=0, max_grad_norm=0, method="full", rank=8
        )
        with pytest.raises(
            NotFinite, match=r"step \d: the (loss|gradient) is not finite; .*try a lower --learning-rate"
        ):
            job.finetune(chosen, tmp_path / "run")


class TestTheBest:
    def run(self, losses: list[float], monkeypatch: pytest.MonkeyPatch, *given: Any, **values: Any) -> Any:
        """A run whose validations give these losses, whatever it learns."""
        remaining = iter(losses)
        monkeypatch.setattr(Trainer, "evaluate", lambda self, batch: {"loss": next(remaining) * len(batch.targets)})
        model, data, out = given
        told = Told()
        outcome = job.finetune(settings(model, data, batch_size=8, eval_every=1, **values), out, watcher=told)
        return outcome, told

    def test_ends_after_so_many_that_are_no_better(
        self, model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        losses = [5.0, 4.0, 3.0, 3.5, 3.0, 3.2, 1.0]
        outcome, told = self.run(losses, monkeypatch, model, data, tmp_path / "run", patience=3)
        assert told.steps == [1, 2, 3, 4, 5]
        assert "nothing better in 3 validations: ended early, at step 5" in told.said
        assert (outcome.state.best_loss, outcome.state.best_step, outcome.first_loss) == (3.0, 2, 5.0)
        folder = RunFolder(tmp_path / "run")
        assert listing(folder.path / "best") == ["step-000002"]
        again = job.resume(folder.path, watcher=(told := Told()))
        assert told.steps == []
        assert again.state == outcome.state

    def test_a_better_one_starts_the_count_anew(
        self, model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        losses = [5.0, 6.0, 4.0, 6.0, 3.0, 6.0, math.nan, 2.0, 7.0]
        outcome, told = self.run(losses, monkeypatch, model, data, tmp_path / "run", patience=3)
        assert told.steps == list(range(1, 9))
        assert outcome.state.best_step == 7

    def test_without_validation_it_is_the_last_one(self, model: Path, data: Path, tmp_path: Path) -> None:
        told = Told()
        outcome = job.finetune(settings(model, data, valid_fraction=0), tmp_path / "run", watcher=told)
        assert outcome.state.best_step is None
        assert outcome.first_loss is None
        assert told.evaluated == []
        assert not (tmp_path / "run" / "best").exists()
        assert (tmp_path / "run" / "adapters.safetensors").exists()

    def test_validates_on_so_many_batches(self, model: Path, data: Path, tmp_path: Path) -> None:
        told = Told()
        job.finetune(settings(model, data, valid=str(data), eval_batches=3, steps=2), tmp_path / "run", watcher=told)
        assert told.evaluated == [(1, 3), (2, 3), (3, 3)] * 2


class TestPlan:
    class Data:
        def batches_in(self, epochs: float) -> int:
            return math.ceil(epochs * 50)

    @pytest.mark.parametrize(
        ("values", "expected"),
        [
            ({}, (150, 15, 15)),
            ({"epochs": 0.01}, (1, 1, 1)),
            ({"accumulation": 4}, (38, 3, 3)),
            ({"steps": 7}, (7, 1, 1)),
            ({"eval_every": 20}, (150, 20, 20)),
            ({"eval_every": 20, "save_every": 5}, (150, 20, 5)),
        ],
    )
    def test_of_settings(self, values: dict[str, Any], expected: tuple[int, int, int]) -> None:
        data: Any = self.Data()
        plan = Plan.of(Settings(**values), data)
        assert (plan.steps, plan.eval_every, plan.save_every) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed",
    [
        {"rank": 3},
        {"alpha": 32.0},
        {"dropout": 0.3},
        {"rslora": True},
        {"targets": ("qkv_proj",)},
        {"layers": "last-1"},
        {"method": "dora"},
        {"max_length": 8},
        {"packing": "on"},
        {"shuffle_window": 1},
        {"batch_size": 3},
        {"accumulation": 2},
        {"learning_rate": 1e-2},
        {"final_learning_rate": 1e-4},
        {"schedule": "linear"},
        {"warmup_steps": 2},
        {"beta1": 0.5},
        {"beta2": 0.5},
        {"eps": 1e-2},
        {"weight_decay": 5.0},
        {"decay_exclude": ("lora_a",)},
        {"max_grad_norm": 1e-9},
        {"seed": 1},
        {"valid_fraction": 0.4},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_every_setting_of_training_changes_it(
    changed: dict[str, Any], model: Path, data: Path, tmp_path: Path, usual: list[Any]
) -> None:
    job.finetune(settings(model, data, **{**USUAL, **changed}), tmp_path / "run")
    assert metrics(tmp_path / "run") != usual


USUAL: dict[str, Any] = {"steps": 4, "learning_rate": 3e-3, "eps": 1e-3, "max_grad_norm": 1.0, "eval_every": 4}


@pytest.fixture(scope="module")
def usual(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    out = tmp_path_factory.mktemp("usual") / "run"
    job.finetune(settings(model, data, **USUAL), out)
    return metrics(out)
