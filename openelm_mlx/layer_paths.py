"""Layers' paths: of those outside of the decoder's layers, and naming many in few words."""

from __future__ import annotations

import re
from collections.abc import Iterable

EMBEDDING = "transformer.token_embeddings"
HEAD = "lm_head"
"""The output head, where it is not the embedding."""

_LAYER = re.compile(r"(?:transformer\.)?layers\.(\d+)\.(.+)")


def grouped(paths: Iterable[str]) -> list[str]:
    """Layer paths, those that differ in the layer's number alone as one: ``layers 0-27 attn.qkv_proj``."""
    others: list[str] = []
    numbers: dict[str, list[int]] = {}
    for path in paths:
        if match := _LAYER.fullmatch(path):
            numbers.setdefault(match[2], []).append(int(match[1]))
        else:
            others.append(path)
    return others + [
        f"layer{'s' if len(found) > 1 else ''} {_ranges(sorted(found))} {rest}" for rest, found in numbers.items()
    ]


def _ranges(numbers: list[int]) -> str:
    """``0-3, 5, 7-8`` for sorted numbers."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
