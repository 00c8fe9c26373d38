"""What a training run tells while it runs, and telling several listeners at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

Metrics = dict[str, Any]
"""One line of metrics.jsonl. A validation has ``valid_loss``, the evaluation at the end ``test_loss``."""


class Watcher(Protocol):
    """Somebody who is told how a run goes: a progress bar, a logger."""

    def say(self, line: str) -> None:
        """A fact for people, in one line."""

    def begin(self, first_step: int, total_steps: int) -> None:
        """Training begins: with the update of this number, which is 1 in a new run, and as far as that one."""

    def step(self, metrics: Metrics) -> None:
        """An update was made."""

    def validating(self, done: int, total: int) -> None:
        """So many batches of an evaluation are done; `done` equals `total` when it is over."""

    def validation(self, metrics: Metrics) -> None:
        """An evaluation's result: a validation's or that of the test split."""

    def end(self) -> None:
        """The run is over, however it ended."""


class Watchers:
    """Tells all of several watchers. One that fails is said once and left out from there on: it must not end a run."""

    def __init__(self, watchers: Iterable[Watcher]) -> None:
        self._watchers = list(watchers)

    def say(self, line: str) -> None:
        self._tell(lambda w: w.say(line))

    def begin(self, first_step: int, total_steps: int) -> None:
        self._tell(lambda w: w.begin(first_step, total_steps))

    def step(self, metrics: Metrics) -> None:
        self._tell(lambda w: w.step(metrics))

    def validating(self, done: int, total: int) -> None:
        self._tell(lambda w: w.validating(done, total))

    def validation(self, metrics: Metrics) -> None:
        self._tell(lambda w: w.validation(metrics))

    def end(self) -> None:
        self._tell(lambda w: w.end())

    def _tell(self, tell: Callable[[Watcher], None]) -> None:
        failed = []
        for watcher in self._watchers:
            try:
                tell(watcher)
            except Exception as e:  # whatever it is: hours of training are worth more than a picture of them
                failed.append((watcher, " ".join(str(e).split()) or type(e).__name__))
        self._watchers = [w for w in self._watchers if all(w is not gone for gone, _ in failed)]
        for watcher, reason in failed:
            self.say(f"warning: {type(watcher).__name__} failed and is left out from here on: {reason}")
