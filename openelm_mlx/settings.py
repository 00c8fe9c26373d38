"""What a person can set when text is generated, and the defaults: the same objects for Python and the command line.

Imports nothing heavy, so that ``openelm --help`` can show them at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from openelm_mlx.errors import OpenELMError

DEFAULT_MAX_TOKENS = 256
"""Most tokens that are generated unless more are asked for."""

CPU_WEIGHTS = ("float32", "keep")
"""What a CPU can do with packed layers: unpack them, or compute on them as they are."""

_LONGEST = 1 << 24
"""Tokens; longer than any window."""


def whole_number(name: str, value: Any, least: int) -> int:
    """`value` if it is a whole number from `least` on.

    Raises:
        OpenELMError: it is something else; the message has its name.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OpenELMError(f"{name} must be a whole number, {least} or more, not {value!r}")
    return value


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen. The defaults are greedy decoding.

    Raises:
        OpenELMError: a value is out of its range.
    """

    temperature: float = 0.0
    """0 takes the most likely token; above, logits are divided by it and sampled."""
    top_k: int = 0
    """Only the k most likely tokens, and those exactly as likely as the last of them; 0 is off."""
    top_p: float = 1.0
    """Only the smallest set of tokens whose probabilities reach p (the token that crosses p included); 1 is off."""
    min_p: float = 0.0
    """Only tokens at least this fraction as likely as the most likely one; 0 is off."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of recent tokens, multiplies the negative ones (Keskar et al. 2019); 1 is off."""
    repetition_context_size: int = 64
    """How many of the last tokens, prompt included, are recent."""
    seed: int | None = None
    """Makes sampling repeatable; None takes a new one each time."""

    def __post_init__(self) -> None:
        self._require("temperature", "a number, 0 or more", lambda x: 0 <= x < math.inf)
        self._require("top_k", "a whole number, 0 (off) or more", lambda x: x >= 0, int)
        self._require("top_p", "above 0 and at most 1 (off)", lambda x: 0 < x <= 1)
        self._require("min_p", "from 0 (off) to 1", lambda x: 0 <= x <= 1)
        self._require("repetition_penalty", "from 0.001 to 1000 (1 is off)", lambda x: 0.001 <= x <= 1000)
        self._require(
            "repetition_context_size", f"a whole number from 1 to {_LONGEST}", lambda x: 1 <= x <= _LONGEST, int
        )
        if self.seed is not None:
            self._require("seed", "a whole number from 0 to 2**64 - 1", lambda x: 0 <= x < 2**64, int)

    def _require(
        self, name: str, range_: str, ok: Callable[[Any], bool], kind: type | tuple[type, ...] = (int, float)
    ) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, kind) or not ok(value):
            raise OpenELMError(f"{name} must be {range_}, not {value!r}")
