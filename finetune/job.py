"""One fine-tuning run from its settings to its result: everything that can be wrong is found before it starts."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openelm_mlx import files, plotting
from openelm_mlx.atomic import check_output
from openelm_mlx.dtypes import dtype_name
from openelm_mlx.finetune import loggers
from openelm_mlx.finetune.base import model_files, open_base
from openelm_mlx.finetune.data.corpus import require_outside
from openelm_mlx.finetune.data.dataset import Progress
from openelm_mlx.finetune.data.preview import preview
from openelm_mlx.finetune.environment import changed_inputs, changed_machine, environment
from openelm_mlx.finetune.feed import data_files, read_data
from openelm_mlx.finetune.losses import Objective
from openelm_mlx.finetune.metrics import read_metrics
from openelm_mlx.finetune.plots import draw
from openelm_mlx.finetune.preferences import Preferences
from openelm_mlx.finetune.preparing import Prepared, bytes_needed, plan_of, prepare
from openelm_mlx.finetune.reference import reference_of
from openelm_mlx.finetune.results import absolute, local_inputs, publish_adapter, publish_model
from openelm_mlx.finetune.run_folder import (
    ENVIRONMENT,
    PLOT,
    RunError,
    RunFolder,
    State,
    holds_only_a_run,
    is_run,
)
from openelm_mlx.finetune.settings import Settings
from openelm_mlx.finetune.step import Trainer, written_out
from openelm_mlx.finetune.trainer import Plan, Run
from openelm_mlx.finetune.watching import Watcher, Watchers
from openelm_mlx.outputs import require_apart


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    folder: Path
    model: str
    """The one it started from, as the settings name it."""
    state: State
    first_loss: float | None
    """Validation loss before training; None without validation."""
    test: dict[str, Any] | None
    """Result on the test split, when there is one."""
    raw: bool
    """Whether prompts were taken without the model's chat template."""


NOBODY = Watchers(())


def finetune(
    settings: Settings,
    out: str | Path,
    *,
    force: bool = False,
    watcher: Watcher = NOBODY,
    reading: Progress | None = None,
    on_signal: Callable[[], None] = lambda: None,
) -> Outcome:
    """Fine-tune a model.

    Args:
        settings: what is trained, on what, and how.
        out: the run's folder, to be made.
        force: replace the folder of an earlier run, and try what may not fit into memory.
        watcher: told what happens.
        reading: told how far reading the data is.
        on_signal: called when a signal has asked the run to stop, in that signal's handler.

    Raises:
        OpenELMError: nothing was trained and no folder made (or the message says how far it came).
        Stopped: by a signal; the run can be resumed.
    """
    out = files.expand(out)
    check_output(out, force=force, ours=holds_only_a_run)
    for source in local_inputs(settings):
        require_apart(source, out)
    if settings.streams:
        require_outside(out, str(settings.data))
    prepared = prepare(settings, watcher, reading, force=force)
    told = _environment(settings, prepared.base)
    with _alone(RunFolder(out)) if is_run(out) else nullcontext():
        folder = RunFolder.create(out, absolute(settings), told, force=force)
    with _alone(folder):
        return _train(prepared, folder, watcher, on_signal, resumed=False)


def resume(
    run: str | Path,
    *,
    changes: Mapping[str, Any] | None = None,
    force: bool = False,
    watcher: Watcher = NOBODY,
    reading: Progress | None = None,
    on_signal: Callable[[], None] = lambda: None,
) -> Outcome:
    """Go on with a run that was stopped; its losses are those it would have had.

    Args:
        run: its folder.
        changes: other settings to go on with, such as more epochs or a lower learning rate.
        force: try what may not fit into memory.
        watcher: told what happens.
        reading: told how far reading the data is.
        on_signal: called when a signal has asked the run to stop, in that signal's handler.

    Raises:
        RunError: there is no such run, it is in use, or its model or data changed since it began.
        SettingsError: a change is not possible.
    """
    folder = RunFolder.open(files.expand(run))
    with _alone(folder):
        settings = folder.settings()
        _check_unchanged(folder, settings, watcher)
        read_metrics(folder.metrics)  # the plot is drawn of it at the end
        changed = settings.changed(changes or {})
        prepared = prepare(changed, watcher, reading, force=force)
        _check_not_past(folder, prepared.plan)
        for line in changed.differences(settings):
            watcher.say(f"note: {line}: from here on it is another run than it would have been")
        folder.change_settings(changed)
        return _train(prepared, folder, watcher, on_signal, resumed=True)


def _check_unchanged(folder: RunFolder, settings: Settings, watcher: Watcher) -> None:
    """Refuse to go on with another model, other data, or settings that somebody edited."""
    now, before = _environment(settings, None), folder.environment()
    try:
        changed, machine = changed_inputs(before, now), changed_machine(before, now)
    except (KeyError, TypeError, AttributeError):
        raise RunError(f"{folder.path / ENVIRONMENT}: is not what a run writes; start a new run with --out") from None
    if changed:
        raise RunError(f"{folder.path}: {', '.join(changed)} changed since the run began; start a new one with --out")
    for line in machine:
        watcher.say(f"note: {line}; the last digits of losses may differ from those of an unbroken run")


def _environment(settings: Settings, base: Path | None) -> dict[str, Any]:
    model, data = model_files(settings), data_files(settings)
    return environment(sys.argv[1:], folder=base, model=model, data=data, settings=settings)


def _check_not_past(folder: RunFolder, plan: Plan) -> None:
    last = folder.last()
    if last is not None and last.state.step > plan.steps:
        raise RunError(f"{folder.path}: {last.state.step} updates are made already, and {plan.steps} were asked for")


def dry_run(settings: Settings, *, say: Callable[[str], None] = print, reading: Progress | None = None) -> list[str]:
    """The first batch, token by token, and how long a run would be; nothing is trained and no weights are read."""
    base = open_base(settings)
    feed = read_data(settings, base, say, reading)
    plan = plan_of(settings, feed.train)
    needed = bytes_needed(settings, base, feed.train)
    return [
        *preview(next(feed.train), base.tokenizer, pairs=settings.objective == "dpo"),
        "",
        f"updates     {plan.steps:,}",
        f"validation  every {plan.eval_every:,}, batches: {len(feed.valid):,}" if feed.valid else "validation  none",
        f"memory      {needed.total / 1e9:.2f} GB ({needed})",
    ]


def _train(
    p: Prepared, folder: RunFolder, watcher: Watcher, on_signal: Callable[[], None], *, resumed: bool
) -> Outcome:
    told = Watchers([watcher, *loggers.loggers(p.settings, folder.path)])
    full = p.settings.method == "full"

    def publish() -> None:
        if not full:  # a whole model is too much to write each time
            publish_adapter(folder.path, p.model, p.settings, p.precision)

    try:
        trainer = Trainer(p.model, p.settings, _objective(p, folder, told))
        run = Run(trainer, folder, p.feed.train, p.feed.valid, p.plan, told, publish, on_signal)
        run.restore(folder.last() if resumed else None)
        state = run.go()
        if full:
            publish_model(folder.path, p.model, p.settings, p.tokenizer, p.base)
        else:
            publish()
        test = _test(p, run)
    finally:
        told.end()
    if p.settings.plot and plotting.possible():
        draw(folder.metrics, folder.path / PLOT)
    return Outcome(folder.path, p.settings.subject, state, _first_loss(folder), test, p.settings.raw)


def _objective(p: Prepared, folder: RunFolder, watcher: Watcher) -> Objective | None:
    """What the run is for, if not to predict tokens. The model is still the one to start from."""
    if p.settings.objective != "dpo":
        return None
    batches, count = p.feed.once()
    subject = {
        "model": folder.environment()["model"]["files"],
        "dtype": dtype_name(p.model.transformer.norm.weight.dtype),
    }
    reference = reference_of(p.model, batches, count, folder, subject, watcher, on_cpu=written_out(p.model))
    return Preferences(p.settings.dpo_loss, p.settings.beta, reference)


def _test(p: Prepared, run: Run) -> dict[str, Any] | None:
    if not p.feed.test:
        return None
    metrics = run.evaluate(p.feed.test, "test")
    run.record(metrics)
    return metrics


def _first_loss(folder: RunFolder) -> float | None:
    losses = [m["valid_loss"] for m in read_metrics(folder.metrics) if "valid_loss" in m]
    return losses[0] if losses else None


@contextmanager
def _alone(folder: RunFolder) -> Iterator[None]:
    """Hold other processes off a run."""
    handle = os.open(folder.metrics, os.O_RDONLY)  # the one file that is never replaced
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"{folder.path}: another process is training this run") from None
        except OSError:  # some network drives have no locks
            pass
        yield
    finally:
        os.close(handle)
