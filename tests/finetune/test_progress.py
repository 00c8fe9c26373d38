"""What people see of a run: plain lines in a file, a bar on a terminal, nothing when quiet."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from openelm_mlx.finetune.progress import Bar, Figures, Lines, duration, progress
from openelm_mlx.finetune.watching import Watcher


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def update(step: int, loss: float = 2.0, **changes: Any) -> dict[str, Any]:
    return {"step": step, "loss": loss, "tokens_per_s": 1000.0, "seconds": 1.0, "memory_gb": 3.56, **changes}


def run(watcher: Watcher, clock: Clock, first: int = 1, total: int = 4, seconds: float = 1.0) -> None:
    watcher.begin(first, total)
    for step in range(first, total + 1):
        clock.now += seconds
        watcher.step(update(step))


def plain() -> tuple[Lines, Clock, io.StringIO]:
    out, clock = io.StringIO(), Clock()
    return Lines(Console(file=out, width=20, highlight=False, emoji=False), clock), clock, out


def test_plain_lines_are_few_but_the_first_and_last_update_have_one() -> None:
    lines, clock, out = plain()
    run(lines, clock, total=100)
    lines.end()
    shown = out.getvalue().splitlines()
    assert [line.split("  ")[0] for line in shown] == [f"step {n}/100" for n in (1, 31, 61, 91, 100)]
    assert shown[1] == "step 31/100  loss 2.000  1,000 tokens/s  3.6 GB  1:09 left"
    assert shown[-1] == "step 100/100  loss 2.000  1,000 tokens/s  3.6 GB  done"


def test_a_run_that_ends_early_has_a_line_for_its_last_update() -> None:
    lines, clock, out = plain()
    lines.begin(1, 100)
    for step in range(1, 6):
        clock.now += 1
        lines.step(update(step))
    lines.end()
    lines.end()
    assert [line.split("  ")[0] for line in out.getvalue().splitlines()] == ["step 1/100", "step 5/100"]


def test_evaluations_have_a_line_each_and_long_ones_more() -> None:
    lines, clock, out = plain()
    run(lines, clock)
    before = len(out.getvalue())
    for done in range(1, 6):
        clock.now += 10
        lines.validating(done, 5)
    lines.validation({"step": 4, "valid_loss": 2.34567, "perplexity": 10.4402, "valid_tokens": 7})
    lines.validation({"step": 4, "test_loss": 1.0, "perplexity": 2.718, "test_tokens": 7})
    assert out.getvalue()[before:].splitlines() == [
        "evaluating: batch 3/5",
        "step 4  validation loss 2.346, perplexity 10.44",
        "step 4  test loss 1.000, perplexity 2.72",
    ]


def test_a_short_evaluation_before_the_first_update_does_not_take_its_line() -> None:
    lines, clock, out = plain()
    lines.begin(1, 100)
    for done in (1, 2, 3):
        clock.now += 1
        lines.validating(done, 3)
    lines.step(update(1))
    assert [line.split("  ")[0] for line in out.getvalue().splitlines()] == ["step 1/100"]
    lines.begin(1, 100)
    clock.now += 31
    lines.validating(1, 3)
    assert out.getvalue().splitlines()[1:] == ["evaluating: batch 1/3"]


def test_plain_output_steers_nothing_and_wraps_nothing() -> None:
    lines, clock, out = plain()
    run(lines, clock)
    lines.say("[bold]data[/bold] \x1b[31m :smile: /a/rather/long/path/that/does/not/fit.jsonl\r\x07")
    lines.end()
    assert all(c.isprintable() or c == "\n" for c in out.getvalue())
    said = out.getvalue().splitlines()[-1]
    assert said == r"[bold]data[/bold] \x1b[31m :smile: /a/rather/long/path/that/does/not/fit.jsonl\r\x07"


def test_a_resumed_run_counts_from_where_it_was() -> None:
    lines, clock, out = plain()
    run(lines, clock, first=41, total=60)
    first, last = out.getvalue().splitlines()
    assert first == "step 41/60  loss 2.000  1,000 tokens/s  3.6 GB  0:19 left"
    assert last.startswith("step 60/60 ")


def test_time_left_counts_evaluations_but_not_the_first_update() -> None:
    clock = Clock()
    figures = Figures(1, 11, clock)
    clock.now += 60  # compiles
    figures.add(update(1))
    assert figures.seconds_left() == 600, "all there is to go by"
    for step in (2, 3):
        clock.now += 1
        figures.add(update(step))
    clock.now += 4  # an evaluation
    assert figures.seconds_left() == pytest.approx((1 + 1 + 4) / 2 * 8)


def test_loss_and_speed_are_smoothed() -> None:
    clock = Clock()
    figures = Figures(1, 3, clock)
    figures.add(update(1, loss=3.0, tokens_per_s=100.0, seconds=2.0))
    assert str(figures).startswith("loss 3.000  100 tokens/s")
    figures.add(update(2, loss=1.0, tokens_per_s=400.0, seconds=1.0))
    # 0.9 x 3 + 1 over 0.9 + 1; tokens (0.9 x 200 + 400) over seconds (0.9 x 2 + 1).
    assert str(figures).startswith("loss 1.947  207 tokens/s")


@pytest.fixture
def terminal() -> Iterator[tuple[Bar, Clock, io.StringIO]]:
    out, clock = io.StringIO(), Clock()
    bar = Bar(Console(file=out, width=100, force_terminal=True, highlight=False, emoji=False), clock)
    yield bar, clock, out
    bar.end()


def states(out: io.StringIO) -> list[str]:
    """The lines that were on the terminal, without colours and movements, in the order of their drawing."""
    return [
        line for line in re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())) if line.strip()
    ]


def test_the_bar(terminal: tuple[Bar, Clock, io.StringIO]) -> None:
    bar, clock, out = terminal
    run(bar, clock, first=3, total=4)
    bar.end()
    assert re.match(r"step 2/4 \S+ *$", states(out)[0])
    assert re.fullmatch(r"step 4/4 ━+ loss 2\.000  1,000 tokens/s  3\.6 GB  done *", states(out)[-1])
    assert out.getvalue().endswith("\n\x1b[?25h"), "the line is ended and the cursor given back"


def test_the_bar_of_an_evaluation_comes_and_goes(terminal: tuple[Bar, Clock, io.StringIO]) -> None:
    bar, clock, out = terminal
    run(bar, clock)
    bar.validating(2, 5)
    time.sleep(0.4)  # it is drawn four times a second
    bar.say("still [here]")
    assert any(line.startswith("evaluating 2/5 ") for line in states(out))
    assert any(line.strip() == "still [here]" for line in states(out))
    bar.validating(5, 5)
    bar.validation({"step": 4, "valid_loss": 2.0, "perplexity": 7.39})
    assert any(line.strip() == "step 4  validation loss 2.000, perplexity 7.39" for line in states(out))
    before = len(states(out))
    bar.end()
    assert not any("evaluating" in line for line in states(out)[before:])


def test_an_evaluation_that_is_interrupted_leaves_no_bar_behind(terminal: tuple[Bar, Clock, io.StringIO]) -> None:
    bar, clock, out = terminal
    run(bar, clock)
    bar.validating(2, 5)
    bar.end()
    assert states(out)[-1].startswith("step 4/4 ")


def test_who_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    run(progress(), Clock())  # standard error is no terminal here
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith("step 1/4  loss 2.000") and "\x1b" not in told.err
    quiet = progress(quiet=True)
    quiet.say("hello")
    run(quiet, Clock())
    quiet.end()
    assert capsys.readouterr() == ("", "")
    assert isinstance(progress(console=Console(force_terminal=True, file=io.StringIO())), Bar)


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.2, "0:00"), (59.6, "1:00"), (125, "2:05"), (3600, "1:00:00"), (360000, "100:00:00")]
)
def test_a_duration(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_preferences_have_an_accuracy_where_texts_have_a_perplexity() -> None:
    lines, _, out = plain()
    lines.validating(1, 3)  # before training begins
    lines.begin(1, 2)
    lines.step(update(1, accuracy=0.5))
    lines.step(update(2, accuracy=1.0))
    for part, name in (("valid", "validation"), ("test", "test")):
        lines.validation({"step": 2, f"{part}_loss": 0.5, f"{part}_accuracy": 0.975, f"{part}_margin": 1.25})
        assert out.getvalue().splitlines()[-1] == f"step 2  {name} loss 0.500, accuracy 97.5%, margin 1.250"
    assert "step 2/2  loss 2.000  accuracy 76%  " in out.getvalue()


def test_a_bar_shows_what_is_evaluated_before_training_begins() -> None:
    out = io.StringIO()
    bar = Bar(Console(file=out, width=80, force_terminal=True, highlight=False, emoji=False))
    bar.validating(1, 3)
    bar.end()
    assert re.search(r"evaluating 1/3", out.getvalue())
    assert "step" not in out.getvalue()
