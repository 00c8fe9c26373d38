"""A result against an older one: what became slower."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from openelm_mlx.benchmarks.choices import THRESHOLD, check_threshold
from openelm_mlx.benchmarks.protocol import Spread
from openelm_mlx.benchmarks.results import Result, Row
from openelm_mlx.benchmarks.table import aligned, number
from openelm_mlx.errors import OpenELMError

_ROUNDING = 1e-9
"""A speed that is lower by exactly the threshold is none, however the division came out."""

_SPEEDS = ("prompt", "generation", "total")
_FACTS = ("chip", "gpu", "cores", "os", "backend", "blas", "versions", "environment")
"""Of the machine: two results that differ in one of them may differ for that reason."""


@dataclass(frozen=True)
class Change:
    """One speed of one row, now and then."""

    row: Row
    speed: str
    """``prompt``, ``generation`` or ``total``."""
    now: float
    """Tokens a second, median."""
    then: float
    slower: bool
    """By more than the threshold."""

    @property
    def ratio(self) -> float:
        """Above 1: faster than it was."""
        return self.now / self.then


@dataclass(frozen=True)
class Comparison:
    """What changed from an older result to a newer one."""

    threshold: float
    changes: tuple[Change, ...]
    notes: tuple[str, ...]
    """Rows without a partner, and machines that are not the same."""

    @property
    def slowdowns(self) -> tuple[Change, ...]:
        """The speeds that fell by more than the threshold."""
        return tuple(change for change in self.changes if change.slower)


def compare(new: Result, old: Result, threshold: float = THRESHOLD) -> Comparison:
    """Compare the rows that both results have: same program, set up in the same way, same model, precision and lengths.

    Args:
        new: the result in question.
        old: what it is held against.
        threshold: a median below ``1 - threshold`` of the old one is a slowdown.

    Raises:
        OpenELMError: the threshold makes no sense, or the results have no row in common.
    """
    check_threshold(threshold)
    before, after = ({row.key: row for row in result.rows} for result in (old, new))
    both = [key for key in after if key in before]
    if not both:
        raise OpenELMError(
            "the results have no row in common (same program, variant, model, precision and numbers of tokens), so "
            "nothing can be compared; measure with the command of the older one"
            + (f": {' '.join(old.command)}" if old.command else "")
        )
    changes = tuple(change for key in both for change in _changes(after[key], before[key], threshold))
    notes = [*_other_machine(new, old)]
    notes += [f"only in the new result: {_named(row)}" for key, row in after.items() if key not in before]
    notes += [f"only in the old result: {_named(row)}" for key, row in before.items() if key not in after]
    return Comparison(threshold, changes, tuple(notes))


def lines(comparison: Comparison) -> list[str]:
    """For people: a line a speed, the notes, and the verdict."""
    headings = ("model", "precision", "program", "tokens", "speed", "then tok/s", "now tok/s", "now/then", "verdict")
    cells = [
        (
            c.row.model,
            c.row.precision,
            c.row.program,
            f"{c.row.prompt_tokens}+{c.row.gen_tokens}",
            c.speed,
            number(c.then),
            number(c.now),
            f"{c.ratio:.3f}",
            "SLOWER" if c.slower else "ok",
        )
        for c in comparison.changes
    ]
    slow, of = len(comparison.slowdowns), len(comparison.changes)
    allowed = f"{comparison.threshold * 100:g}%"
    verdict = f"{slow} of {of} speeds fell by more than {allowed}" if slow else f"no speed fell by more than {allowed}"
    notes = [f"note: {note}" for note in comparison.notes]
    return [*aligned([headings, *cells], left=(0, 1, 2, 3, 4, 8)), "", *notes, verdict]


def _changes(now: Row, then: Row, threshold: float) -> Iterator[Change]:
    for speed in _SPEEDS:
        a, b = (_spread(row, speed).median for row in (now, then))
        yield Change(now, speed, a, b, slower=a < b * (1 - threshold) * (1 - _ROUNDING))


def _spread(row: Row, speed: str) -> Spread:
    spread: Spread = getattr(row, f"{speed}_tps")
    return spread


def _other_machine(new: Result, old: Result) -> Iterator[str]:
    for fact in _FACTS:
        now, then = new.machine.get(fact), old.machine.get(fact)
        if now != then:
            yield f"not the same {fact}: now {_fact(now)}, then {_fact(then)}"


def _fact(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(f"{k}={v}" for k, v in value.items()) or "none"
    return "unknown" if value is None else str(value)


def _named(row: Row) -> str:
    return f"{row.program}, {row.model} {row.precision}, {row.prompt_tokens}+{row.gen_tokens} tokens"
