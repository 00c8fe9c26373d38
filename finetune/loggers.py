"""TensorBoard and Weights & Biases, for those who asked for them."""

from __future__ import annotations

import importlib.util
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openelm_mlx.errors import OpenELMError
from openelm_mlx.finetune.settings import Settings
from openelm_mlx.finetune.watching import Metrics, Watcher

EVENTS = "tensorboard"
"""The folder of a run in which TensorBoard's event files lie."""
WANDB_ID = "wandb-id"
"""The file of a run that names its W&B run, which a resumed one goes on with."""


def require(settings: Settings) -> None:
    """Refuse loggers that could not log, before the run begins.

    W&B asks for its key here when it has none and there is a terminal to ask on.

    Raises:
        OpenELMError: a package is not installed, or W&B has no key.
    """
    if settings.tensorboard:
        _installed("tensorboardX", "tensorboard")
    if settings.wandb is not None:
        _installed("wandb", "wandb")
        _logged_in()


def loggers(settings: Settings, run: Path) -> list[Watcher]:
    """The loggers that the settings ask for; `run` is the run's folder, a resumed run's too."""
    found: list[Watcher] = []
    if settings.tensorboard:
        found.append(TensorBoard(run))
    if settings.wandb is not None:
        found.append(WeightsAndBiases(run, settings.wandb, settings.to_mapping()))
    return found


class _Logger:
    """What the loggers have in common: they pass figures on."""

    def __init__(self) -> None:
        self._close: Callable[[], None] | None = None

    def say(self, line: str) -> None:
        """For people."""

    def validating(self, done: int, total: int) -> None:
        """For people."""

    def step(self, metrics: Metrics) -> None:
        self._log(metrics["step"], scalars(metrics))

    def validation(self, metrics: Metrics) -> None:
        self._log(metrics["step"], scalars(metrics))

    def end(self) -> None:
        if self._close is not None:
            self._close()

    def _log(self, step: int, values: dict[str, float]) -> None:
        raise NotImplementedError


class TensorBoard(_Logger):
    """Event files, without TensorFlow: `tensorboard --logdir RUN` shows them."""

    def __init__(self, run: Path) -> None:
        super().__init__()
        self._folder = run / EVENTS

    def begin(self, first_step: int, total_steps: int) -> None:
        from tensorboardX import SummaryWriter

        # A killed run may have told of more updates than its last checkpoint has: they are made, and told, again.
        purge = first_step if first_step > 1 else None
        # The suffix: files are named after the second and the host, and one that is there would be overwritten.
        self._writer = SummaryWriter(
            str(self._folder), purge_step=purge, flush_secs=10, filename_suffix=f".{first_step}"
        )
        self._close = self._writer.close

    def _log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)


class WeightsAndBiases(_Logger):
    """A W&B run. Its x axis is the update, so that those made again after a crash stand where they stood."""

    def __init__(self, run: Path, project: str, config: dict[str, Any]) -> None:
        super().__init__()
        self._folder, self._project, self._config = run, project, config

    def begin(self, first_step: int, total_steps: int) -> None:
        import wandb

        self._run = wandb.init(
            project=self._project,
            name=self._folder.resolve().name,
            dir=str(self._folder),
            config=self._config,
            id=_kept_id(self._folder / WANDB_ID),
            resume="allow",
            settings=wandb.Settings(console="off"),  # it would record every state of the progress bar
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._close = self._run.finish

    def _log(self, step: int, values: dict[str, float]) -> None:
        self._run.log({"step": step, **values})


def scalars(metrics: Metrics) -> dict[str, float]:
    """A line of metrics.jsonl as loggers call it: ``train/loss``, ``valid/loss``, ``test/perplexity``."""
    part = next((p for p in ("valid", "test") if f"{p}_loss" in metrics), "train")
    return {f"{part}/{key.removeprefix(f'{part}_')}": value for key, value in metrics.items() if key != "step"}


def _installed(module: str, extra: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise OpenELMError(f"{extra}: needs the package {module}: pip install 'openelm-mlx[{extra}]'")


def _logged_in() -> None:
    import wandb

    if wandb.setup().settings.mode != "online":
        return
    try:
        known = wandb.login()
    except wandb.Error as e:
        raise OpenELMError(f"wandb: {e} Or keep the figures here with WANDB_MODE=offline") from None
    if not known:
        raise OpenELMError("wandb: not logged in; run `wandb login`, or keep the figures here with WANDB_MODE=offline")


def _kept_id(file: Path) -> str:
    if file.is_file():
        return file.read_text(encoding="utf-8").strip()
    name = uuid.uuid4().hex[:8]
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(name, encoding="utf-8")
    os.replace(partial, file)  # noqa: PTH105
    return name
