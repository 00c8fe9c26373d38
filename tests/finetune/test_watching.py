"""Several watchers: all are told everything, and one that fails is left out without ending the run."""

from __future__ import annotations

from typing import Any

import pytest

from openelm_mlx.finetune.watching import Watcher, Watchers


class Recorder:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def say(self, line: str) -> None:
        self.told.append(line)

    def begin(self, first_step: int, total_steps: int) -> None:
        self.told.append(("begin", first_step, total_steps))

    def step(self, metrics: dict[str, Any]) -> None:
        self.told.append(("step", metrics))

    def validating(self, done: int, total: int) -> None:
        self.told.append(("validating", done, total))

    def validation(self, metrics: dict[str, Any]) -> None:
        self.told.append(("validation", metrics))

    def end(self) -> None:
        self.told.append("end")


class Broken(Recorder):
    """Fails at every step."""

    def step(self, metrics: dict[str, Any]) -> None:
        super().step(metrics)
        raise OSError("No space\nleft on device")


class Speechless(Recorder):
    """Cannot even be told a line."""

    def say(self, line: str) -> None:
        super().say(line)
        raise BrokenPipeError


def a_run(watcher: Watcher) -> None:
    watcher.say("hello")
    watcher.begin(1, 2)
    watcher.step({"step": 1})
    watcher.validating(1, 1)
    watcher.validation({"step": 1, "valid_loss": 2.0})
    watcher.step({"step": 2})
    watcher.end()


TOLD = [
    "hello",
    ("begin", 1, 2),
    ("step", {"step": 1}),
    ("validating", 1, 1),
    ("validation", {"step": 1, "valid_loss": 2.0}),
    ("step", {"step": 2}),
    "end",
]


def test_all_are_told_everything_in_order() -> None:
    first, second = Recorder(), Recorder()
    a_run(Watchers([first, second]))
    assert first.told == second.told == TOLD


@pytest.mark.parametrize("position", [0, 1])
def test_one_that_fails_is_said_once_and_left_out(position: int) -> None:
    well, broken = Recorder(), Broken()
    a_run(Watchers([broken, well] if position == 0 else [well, broken]))
    assert broken.told == TOLD[:3]
    notes = [line for line in well.told if isinstance(line, str) and line.startswith("warning")]
    assert notes == ["warning: Broken failed and is left out from here on: No space left on device"]
    assert [event for event in well.told if event not in notes] == TOLD


def test_all_may_fail() -> None:
    speechless, broken = Speechless(), Broken()
    a_run(Watchers([speechless, broken]))
    assert speechless.told == ["hello"]
    assert broken.told == [
        "hello",
        "warning: Speechless failed and is left out from here on: BrokenPipeError",
        *TOLD[1:3],
    ]


def test_an_interruption_is_no_failure() -> None:
    class Interrupted(Recorder):
        def step(self, metrics: dict[str, Any]) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        a_run(Watchers([Interrupted()]))
