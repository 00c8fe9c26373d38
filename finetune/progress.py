"""How a run goes, on stderr: a bar on a terminal, and now and then a plain line anywhere else."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from openelm_mlx.finetune.watching import Metrics, Watcher, Watchers

_EVERY = 30.0
"""Seconds between plain lines."""
_KEEP = 0.9
"""Of the smoothed figures, what stays when an update is added."""

Clock = Callable[[], float]


def progress(*, quiet: bool = False, console: Console | None = None) -> Watcher:
    """A watcher for people; it tells nothing if `quiet`. `console` is standard error unless one is given."""
    if quiet:
        return Watchers(())
    if console is None:
        console = Console(stderr=True, highlight=False, emoji=False)
    return Bar(console) if console.is_interactive else Lines(console)


class Figures:
    """What is shown of the updates made so far: loss and speed smoothed, and how long the rest will take."""

    def __init__(self, first_step: int, total_steps: int, clock: Clock) -> None:
        self.total = total_steps
        self.done = first_step - 1
        """Number of the last update."""
        self._clock = clock
        self._timed_from, self._since = self.done, clock()
        self._seconds_of_first: float | None = None
        self._loss = self._tokens = self._seconds = self._weight = self._memory = 0.0
        self._accuracy: float | None = None

    def add(self, metrics: Metrics) -> None:
        """Take an update in."""
        self.done = metrics["step"]
        if self._seconds_of_first is None:  # it compiles, and says little of the others
            now = self._clock()
            self._seconds_of_first = now - self._since
            self._timed_from, self._since = self.done, now
        self._loss = _KEEP * self._loss + metrics["loss"]
        if "accuracy" in metrics:
            self._accuracy = _KEEP * (self._accuracy or 0.0) + metrics["accuracy"]
        self._tokens = _KEEP * self._tokens + metrics["tokens_per_s"] * metrics["seconds"]
        self._seconds = _KEEP * self._seconds + metrics["seconds"]
        self._weight = _KEEP * self._weight + 1
        self._memory = metrics["memory_gb"]

    def seconds_left(self) -> float:
        """By the mean time of an update in this process, with what evaluations and checkpoints took."""
        timed = self.done - self._timed_from
        each = (self._clock() - self._since) / timed if timed else self._seconds_of_first or 0.0
        return each * (self.total - self.done)

    def __str__(self) -> str:
        loss, speed = self._loss / self._weight, self._tokens / max(self._seconds, 1e-9)
        left = f"{duration(self.seconds_left())} left" if self.done < self.total else "done"
        accuracy = "" if self._accuracy is None else f"accuracy {self._accuracy / self._weight:.0%}  "
        return f"loss {loss:.3f}  {accuracy}{speed:,.0f} tokens/s  {self._memory:.1f} GB  {left}"


class Lines:
    """Plain lines: the first update, then one every half minute, every result of an evaluation, and the last update."""

    def __init__(self, console: Console, clock: Clock = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._figures = Figures(1, 0, clock)
        self._last_line, self._last_step, self._begun = -math.inf, 0, -math.inf

    def say(self, line: str) -> None:
        _print(self._console, line)

    def begin(self, first_step: int, total_steps: int) -> None:
        self._figures = Figures(first_step, total_steps, self._clock)
        self._last_line, self._last_step, self._begun = -math.inf, first_step - 1, self._clock()

    def step(self, metrics: Metrics) -> None:
        self._figures.add(metrics)
        if self._figures.done == self._figures.total or self._due():
            self._show()

    def validating(self, done: int, total: int) -> None:
        lasting = self._clock() - self._begun >= _EVERY  # a short one before the first update needs no line
        if done < total and lasting and self._due():
            self._last_line = self._clock()
            self.say(f"evaluating: batch {done}/{total}")

    def validation(self, metrics: Metrics) -> None:
        self.say(evaluation_line(metrics))

    def end(self) -> None:
        if self._figures.done > self._last_step:
            self._show()

    def _due(self) -> bool:
        return self._clock() - self._last_line >= _EVERY

    def _show(self) -> None:
        self._last_line, self._last_step = self._clock(), self._figures.done
        self.say(f"step {self._figures.done}/{self._figures.total}  {self._figures}")


class Bar:
    """A bar at the bottom of the terminal, a second one while an evaluation lasts, and lines above them."""

    def __init__(self, console: Console, clock: Clock = time.monotonic) -> None:
        self._console, self._clock = console, clock
        count, figures = (
            TextColumn("{task.description} {task.completed}/{task.total}"),
            TextColumn("{task.fields[figures]}"),
        )
        self._bars = Progress(count, BarColumn(20), figures, console=console, refresh_per_second=4)
        self._figures = Figures(1, 0, clock)
        self._training = self._bars.add_task("step", total=None, visible=False, figures="")
        self._evaluation = self._bars.add_task("evaluating", total=None, visible=False, figures="")

    def say(self, line: str) -> None:
        _print(self._console, line)

    def begin(self, first_step: int, total_steps: int) -> None:
        self._figures = Figures(first_step, total_steps, self._clock)
        self._bars.update(self._training, total=total_steps, completed=first_step - 1, visible=True)
        self._bars.start()

    def step(self, metrics: Metrics) -> None:
        self._figures.add(metrics)
        self._bars.update(self._training, completed=metrics["step"], figures=str(self._figures))

    def validating(self, done: int, total: int) -> None:
        self._bars.update(self._evaluation, completed=done, total=total, visible=done < total)
        self._bars.start()  # what preferences are compared with is computed before training begins

    def validation(self, metrics: Metrics) -> None:
        self.say(evaluation_line(metrics))

    def end(self) -> None:
        self._bars.update(self._evaluation, visible=False)
        self._bars.stop()


def evaluation_line(metrics: Metrics) -> str:
    """An evaluation's result for people."""
    name, part = ("test", "test") if "test_loss" in metrics else ("validation", "valid")
    if "perplexity" in metrics:
        more = f"perplexity {metrics['perplexity']:.2f}"
    else:
        more = f"accuracy {metrics[f'{part}_accuracy']:.1%}, margin {metrics[f'{part}_margin']:.3f}"
    return f"step {metrics['step']}  {name} loss {metrics[f'{part}_loss']:.3f}, {more}"


def duration(seconds: float) -> str:
    """``1:02:03``, or ``2:03`` below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _print(console: Console, line: str) -> None:
    # Names of files get here, and must not steer a terminal.
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
    console.print(Text(shown), soft_wrap=True)
