"""The clock that all peers written in Python are measured with."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable

from openelm_mlx.benchmarks.protocol import Timing
from openelm_mlx.errors import OpenELMError

LEAST = 2
"""Tokens without which there is no speed after the first."""


def timed(
    pieces: Iterable[list[int]], prompt_tokens: int, gen_tokens: int, time_limit: float | None
) -> tuple[Timing, list[int]]:
    """Time a generation.

    Args:
        pieces: the tokens as the host reads them: the first one alone, later ones in pieces of any size. Nothing may
            have been done for them before the first is asked for.
        prompt_tokens: length of the prompt.
        gen_tokens: stop after so many.
        time_limit: stop after so many seconds since the first token (at least two tokens are kept); None: never.

    Returns:
        The times, and the tokens.
    """
    gc.collect()  # so that it need not happen inside
    tokens: list[int] = []
    start = first = last = time.perf_counter()
    for piece in pieces:
        last = time.perf_counter()
        if not tokens:
            assert len(piece) == 1
            first = last
        tokens += piece
        if len(tokens) >= gen_tokens:
            break
        if time_limit is not None and len(tokens) >= LEAST and last - first >= time_limit:
            break
    if len(tokens) < LEAST:
        raise OpenELMError(f"generation ended after {len(tokens)} of {gen_tokens} tokens, too few to tell a speed")
    return Timing(prompt_tokens, first - start, len(tokens), last - first), tokens
