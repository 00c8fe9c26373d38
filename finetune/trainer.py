"""The training loop: updates, validations, checkpoints, and stopping at any moment without losing anything."""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import mlx.core as mx

from openelm_mlx.finetune.data.types import Batch, Stream
from openelm_mlx.finetune.optimizer import learning_rate
from openelm_mlx.finetune.run_folder import Checkpoint, RunError, RunFolder, State
from openelm_mlx.finetune.settings import Settings
from openelm_mlx.finetune.step import NotFinite, Trainer
from openelm_mlx.finetune.watching import Watcher
from openelm_mlx.trees import Tensors, nested, trainable

EVALUATIONS = 10
"""In a run, unless it is told how often."""

_NAMED = 8
"""Examples that a message about a batch names."""

Publish = Callable[[], None]
"""Puts the parameters that the model has where people look for the result."""


class Stopped(Exception):
    """A signal asked the run to end; its state was saved."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


@dataclass(frozen=True)
class Plan:
    """When what happens in a run."""

    steps: int
    """Updates in all."""
    eval_every: int
    save_every: int

    @classmethod
    def of(cls, settings: Settings, train: Stream) -> Plan:
        """From the settings, and how many batches the data makes."""
        s = settings
        steps = s.steps or max(1, math.ceil(train.batches_in(s.epochs) / s.accumulation))
        eval_every = s.eval_every or max(1, steps // EVALUATIONS)
        return cls(steps, eval_every, s.save_every or eval_every)


class Run:
    """A run in its folder.

    Args:
        trainer: the model and its optimizer.
        folder: where everything goes.
        train: the training data, endless.
        valid: batches to validate on, the same each time; none to do without.
        plan: how long, and when what.
        watcher: told what happens.
        publish: called when the model has the best parameters so far.
        on_signal: called in a signal's handler, where little may be done.
    """

    def __init__(
        self,
        trainer: Trainer,
        folder: RunFolder,
        train: Stream,
        valid: list[Batch],
        plan: Plan,
        watcher: Watcher,
        publish: Publish,
        on_signal: Callable[[], None] = lambda: None,
    ) -> None:
        self.trainer = trainer
        self.folder = folder
        self.train = train
        self.valid = valid
        self.plan = plan
        self.watcher = watcher
        self.publish = publish
        self._on_signal = on_signal
        self.settings: Settings = trainer.settings
        self.state = State(position=train.position)
        self._signal: int | None = None

    def restore(self, checkpoint: Checkpoint | None) -> None:
        """Go on from a checkpoint; None is the beginning."""
        if checkpoint is not None:
            self._check(checkpoint)
            self.state = checkpoint.state
            self.train.seek(self.state.position)
            self._load(checkpoint.weights)
            self.trainer.optimizer.load_state(checkpoint.optimizer, self.state.step)
        if self.folder.metrics.stat().st_size < self.state.metrics_bytes:
            self.watcher.say(f"note: {self.folder.metrics} is shorter than it was: lines of earlier updates are lost")
        self.folder.begin_metrics(self.state.metrics_bytes)

    def go(self) -> State:
        """Train to the end, or to where nothing gets better any more; the model then has the best parameters.

        Raises:
            Stopped: by SIGINT, SIGTERM or SIGHUP. A checkpoint is saved, so the run can go on from here.
            NotFinite: a loss is not finite; the message says where, and what the last good checkpoint is.
        """
        with self._signals():
            self.watcher.begin(self.state.step + 1, self.plan.steps)
            self._validate_if_due()
            while self.state.step < self.plan.steps and not self._patience_is_over():
                self._update()
                self._validate_if_due()
                if self._signal is not None or self.state.step % self.plan.save_every == 0:
                    self._save()
            self._save()
        if self.state.best_step is not None:
            self._load(self.folder.best(self.state.best_step))
        return self.state

    def evaluate(self, batches: list[Batch], name: str) -> dict[str, Any]:
        """The objective's figures for the model as it is, as means; for next tokens the perplexity too."""
        objective = self.trainer.objective
        totals, count = dict.fromkeys(objective.figures, 0.0), 0
        for done, batch in enumerate(batches, 1):
            for figure, total in self.trainer.evaluate(batch).items():
                totals[figure] += total
            count += objective.count(batch)
            self.watcher.validating(done, len(batches))
            self._stop_if_asked()
        metrics = {
            "step": self.state.step,
            **{f"{name}_{figure}": total / count for figure, total in totals.items()},
            f"{name}_{objective.unit}": count,
        }
        if objective.unit == "tokens":
            loss = metrics[f"{name}_loss"]
            metrics["perplexity"] = math.exp(loss) if loss < 700 else math.inf
        return metrics

    def record(self, metrics: dict[str, Any]) -> None:
        """Write an evaluation's result down and tell it."""
        self.state.metrics_bytes = self.folder.add_metrics(metrics)
        self.watcher.validation(metrics)

    # Inside

    def _check(self, checkpoint: Checkpoint) -> None:
        for what, found, expected in (
            ("weights", checkpoint.weights, trainable(self.trainer.model)),
            ("optimizer's state", checkpoint.optimizer, self.trainer.optimizer.state),
        ):
            if {n: t.shape for n, t in found.items()} != {n: t.shape for n, t in expected.items()}:
                raise RunError(
                    f"{self.folder.path}: the {what} saved at step {checkpoint.state.step} are not those of this model "
                    "with these settings: config.yaml or the model was changed"
                )

    def _update(self) -> None:
        start = time.perf_counter()
        epoch = self.train.position["epoch"]
        batches = [next(self.train) for _ in range(self.settings.accumulation)]
        rate = learning_rate(self.state.step, self.plan.steps, self.settings)
        mx.reset_peak_memory()
        try:
            update = self.trainer.update(batches, rate)
        except NotFinite as e:
            raise NotFinite(f"step {self.state.step + 1}: {e}; {self._where(batches)}; {self._last_good()}") from None
        seconds = time.perf_counter() - start
        self.state.step += 1
        self.state.position = self.train.position
        metrics = {
            "step": self.state.step,
            "epoch": epoch,
            **update.figures,
            "grad_norm": update.norm,
            "learning_rate": rate,
            "tokens": update.targets,
            "seen": update.tokens,
            "seconds": round(seconds, 4),
            "tokens_per_s": round(update.targets / seconds, 1),
            "memory_gb": round(mx.get_peak_memory() / 1e9, 3),
        }
        self.state.metrics_bytes = self.folder.add_metrics(metrics)
        self.watcher.step(metrics)

    def _validate_if_due(self) -> None:
        step = self.state.step
        due = step % self.plan.eval_every == 0 or step == self.plan.steps
        if not (self.valid and due) or self.state.validated == step:
            return
        metrics = self.evaluate(self.valid, "valid")
        self.state.validated = step
        loss = metrics["valid_loss"]
        if math.isfinite(loss) and (self.state.best_loss is None or loss < self.state.best_loss):
            self.state.best_loss, self.state.best_step, self.state.stale = loss, step, 0
            self.folder.save_best(trainable(self.trainer.model), self.state)
            self.publish()
        else:
            self.state.stale += 1
        self.record(metrics)

    def _patience_is_over(self) -> bool:
        if not self.settings.patience or self.state.stale < self.settings.patience:
            return False
        self.watcher.say(f"nothing better in {self.state.stale} validations: ended early, at step {self.state.step}")
        return True

    def _save(self) -> None:
        state = self.state
        if not self.folder.has(state.step):
            weights, optimizer = trainable(self.trainer.model), self.trainer.optimizer.state
            self.folder.save(Checkpoint(state, weights, optimizer), self.settings.keep)
            if not self.valid:
                self.publish()
        if self._signal is not None:
            raise Stopped(self._signal)

    def _stop_if_asked(self) -> None:
        """In an evaluation, which will be done again."""
        if self._signal is not None:
            self._save()

    def _load(self, weights: Tensors) -> None:
        self.trainer.model.update(nested(weights))

    def _where(self, batches: list[Batch]) -> str:
        where = [w for batch in batches for w in batch.where]
        more = f" and {len(where) - _NAMED} more" if len(where) > _NAMED else ""
        return f"its examples: {', '.join(where[:_NAMED])}{more}"

    def _last_good(self) -> str:
        places = self.folder.checkpoints()
        kept = f"the last good checkpoint is {places[-1]}" if places else "there was no checkpoint yet"
        return f"{kept}, and nothing was overwritten; try a lower --learning-rate"

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGINT, SIGTERM and SIGHUP end the run after the update in progress; a second one at once."""
        before: dict[int, Any] = {}

        def note(signum: int, frame: FrameType | None) -> None:
            if self._signal is not None:
                sys.exit(128 + signum)
            self._signal = signum
            self._on_signal()

        try:
            for asked in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(asked) != signal.SIG_IGN:  # nohup ignores SIGHUP
                    before[asked] = signal.signal(asked, note)
        except ValueError:  # not the main thread: whoever runs that has to see to signals
            pass
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
