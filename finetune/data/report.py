"""What was counted while data was read, in figures and in lines for people."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from openelm_mlx.finetune.data.types import Item, Pair


@dataclass
class Report:
    """Counts of one split's records."""

    split: str
    """What it is for: train, valid or test."""
    source: str
    """The file or data set it was read from."""
    max_length: int
    """Most tokens of an example."""
    unit: str = "example"
    """What an example is called."""
    examples: int = 0
    tokens: int = 0
    """Of the examples, after cutting."""
    learned: int = 0
    """Tokens that are targets."""
    empty: int = 0
    """Records without any text to learn, left out."""
    dropped: int = 0
    """Examples left out because their prompt leaves no room for anything to learn."""
    cut: int = 0
    """Examples that lost their end; of a pair, either of its responses."""
    lost: int = 0
    """Tokens they lost."""
    shortened: int = 0
    """Pairs whose prompt lost its beginning."""
    same: int = 0
    """Pairs whose two responses nothing tells apart, left out."""
    duplicates: int = 0
    """Examples whose tokens are those of an earlier one; they are trained on."""
    spelled: int = 0
    """Examples whose text has the end-of-text token written out."""
    eos: str = ""
    """How that is written."""
    bad: int = 0
    """Records that are no examples, left out."""
    first_bad: str = ""
    """Where the first of these is, and why."""

    def count(self, whole: Item | None, kept: Item | None) -> Item | None:
        """Count an example (None: there was nothing to learn) and what cutting left of it; returns the latter."""
        if whole is None:
            self.empty += 1
        elif kept is None:
            self.dropped += 1
        elif isinstance(kept, Pair) and kept.same:
            self.same += 1
            return None
        else:
            self._add(kept)
            self.shortened += isinstance(kept, Pair) and kept.prompt_lost > 0
            self.cut += len(kept.ids) < len(whole.ids)
            self.lost += len(whole.ids) - len(kept.ids)
        return kept

    def count_bad(self, problem: str) -> None:
        """Count a record that is no example."""
        self.bad += 1
        self.first_bad = self.first_bad or problem

    def of_rest(self, examples: Iterable[Item]) -> Report:
        """The same reading, when only these examples are left of it."""
        report = dataclasses.replace(self, examples=0, tokens=0, learned=0)
        for example in examples:
            report._add(example)
        return report

    def of_kept(self, examples: Iterable[Item]) -> Report:
        """A report of examples kept from these for validation."""
        report = Report("valid", f"kept from {self.source}", self.max_length, unit=self.unit)
        for example in examples:
            report._add(example)
        return report

    def lines(self) -> list[str]:
        """For people, one fact a line."""
        facts = [
            f"{_count(self.examples, self.unit)}, {_count(self.tokens, 'token')}, {self.learned:,} of them learned "
            f"({self.source})",
            *self._left_out(),
        ]
        if self.shortened:
            facts.append(f"{_count(self.shortened, 'prompt')} without their beginning, too long for --max-prompt")
        if self.cut:
            facts.append(
                f"{_count(self.cut, self.unit)} cut to {self.max_length:,} tokens (--max-length), "
                f"{_count(self.lost, 'token')} lost"
            )
        if self.duplicates:
            facts.append(f"{_count(self.duplicates, self.unit)} the same as an earlier one")
        if self.spelled:
            facts.append(
                f"{_count(self.spelled, self.unit)} with {self.eos} written out, which is learned as text: the end is "
                "marked without it, and messages get their template from the model"
            )
        return [f"{self.split}: {fact}" for fact in facts]

    def nothing_left(self) -> str:
        """The message when there is no example."""
        return f"{self.source}: no {self.unit} is left for {self.split}: {'; '.join(self._left_out()) or 'it is empty'}"

    def _left_out(self) -> list[str]:
        facts = []
        if self.empty:
            facts.append(f"{_count(self.empty, 'record')} left out, with no text to learn")
        if self.dropped:
            facts.append(
                f"{_count(self.dropped, self.unit)} left out, as the prompt alone fills {self.max_length:,} tokens "
                "(--max-length)"
            )
        if self.same:
            facts.append(f"{_count(self.same, 'pair')} left out, whose responses nothing tells apart")
        if self.bad:
            facts.append(f"{_count(self.bad, 'bad line')} left out, the first: {self.first_bad}")
        return facts

    def _add(self, example: Item) -> None:
        self.examples += 1
        self.tokens += len(example.ids)
        self.learned += int(example.learn.sum())


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
