"""Keeping a part of the examples for validation."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

from openelm_mlx.finetune.data.types import Item

_Kind = TypeVar("_Kind", bound=Item)

_MOST = 500
_ENOUGH = 20
"""From so many examples on one is kept, however small the fraction."""


def content(example: Item, seed: int = 0) -> bytes:
    """What tells the tokens of an example from those of others."""
    return hashlib.blake2b(f"{seed}:".encode() + example.ids.tobytes(), digest_size=16).digest()


def keep_for_validation(examples: Sequence[_Kind], fraction: float, seed: int) -> tuple[list[_Kind], list[_Kind]]:
    """The examples to train on and those kept, both in their order.

    Which are kept depends on what they say and on the seed, not on where they are: more data moves no example that was
    trained on into validation but for want of room. Those that say the same stay together.
    """
    most = min(_MOST, int(fraction * len(examples)) or (len(examples) >= _ENOUGH and fraction > 0))
    keys = [content(example, seed) for example in examples]
    times = Counter(keys)
    kept: set[bytes] = set()
    count = 0
    for key in sorted(times):
        if count + times[key] <= most:
            kept.add(key)
            count += times[key]
    return (
        [example for example, key in zip(examples, keys, strict=True) if key not in kept],
        [example for example, key in zip(examples, keys, strict=True) if key in kept],
    )
