"""What is run, and what comes of it: prompts, repeats, and times turned into tokens a second.

Imports nothing heavy, so that ``openelm bench --help`` can show the defaults.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from openelm_mlx.errors import OpenELMError
from openelm_mlx.settings import whole_number

WINDOW = 2048
"""OpenELM's window: a prompt and what follows it never exceed it."""


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """How a speed is measured: batch of one, key-value cache on, greedy, end-of-sequence tokens ignored.

    Raises:
        OpenELMError: a value is out of its range.
    """

    prompt_tokens: int = 36
    """Length of the prompt."""
    gen_tokens: int = 1024
    """Tokens generated, the first included."""
    repeats: int = 5
    """Measured runs of every model, after its warm-up."""
    dry_run: bool = True
    """Whether the first model does one whole run that does not count."""
    time_limit: float | None = None
    """Seconds after which a run stops generating (its speed is that of what it did); None: never."""

    def __post_init__(self) -> None:
        for name, least in (("prompt_tokens", 1), ("gen_tokens", 2), ("repeats", 1)):
            whole_number(name, getattr(self, name), least)
        if self.prompt_tokens + self.gen_tokens > WINDOW:
            raise OpenELMError(
                f"a prompt of {self.prompt_tokens} and {self.gen_tokens} generated tokens exceed the window of {WINDOW}"
            )
        if self.time_limit is not None and not self.time_limit > 0:
            raise OpenELMError(f"time_limit must be a number of seconds above 0, not {self.time_limit!r}")

    def within(self, window: int) -> Protocol:
        """The same, with as many generated tokens as a model's window leaves room for.

        Raises:
            OpenELMError: the prompt leaves no room.
        """
        room = window - self.prompt_tokens
        if room < 2:
            raise OpenELMError(
                f"a prompt of {self.prompt_tokens} tokens leaves no room in the window of {window}; "
                "give fewer --prompt-tokens"
            )
        return dataclasses.replace(self, gen_tokens=min(self.gen_tokens, room))


PROTOCOLS = {"paper": Protocol(), "quick": Protocol(gen_tokens=128, repeats=3, dry_run=False)}
"""``paper``: the OpenELM paper's (section 4.3): about 36 prompt tokens, 1,024 generated."""


@dataclass(frozen=True)
class Timing:
    """One run of one model."""

    prompt_tokens: int
    prompt_s: float
    """From the call to the first token, read by the host."""
    gen_tokens: int
    """Tokens generated, the first included."""
    gen_s: float
    """From the first token to the last."""

    @property
    def prompt_tps(self) -> float:
        """Prompt tokens a second."""
        return self.prompt_tokens / self.prompt_s

    @property
    def generation_tps(self) -> float:
        """Tokens a second after the first one."""
        return (self.gen_tokens - 1) / self.gen_s

    @property
    def total_tps(self) -> float:
        """Prompt and generated tokens over the whole time, as the paper's total throughput."""
        return (self.prompt_tokens + self.gen_tokens) / (self.prompt_s + self.gen_s)


@dataclass(frozen=True)
class Spread:
    """Several measurements of one thing."""

    median: float
    least: float
    most: float
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values), tuple(values))

    def __truediv__(self, other: Spread) -> Spread:
        """Ratios of runs that were made in turn, pair by pair."""
        return Spread.of([a / b for a, b in zip(self.values, other.values, strict=True)])


def prompt_ids(length: int, vocab_size: int, seed: int = 0) -> list[int]:
    """A prompt of `length` ids, the same for every peer; no control ids (those below 3)."""
    rng = random.Random(seed)
    return [rng.randrange(min(3, vocab_size - 1), vocab_size) for _ in range(length)]
