"""A ``.safetensors`` file as named byte ranges, checked before anything is read.

Format: 8 bytes of little-endian header length, a JSON header, then the tensors' bytes
(https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
import struct
from math import prod
from pathlib import Path
from typing import Any

from openelm_mlx.errors import CheckpointError
from openelm_mlx.rawtensor import ITEMSIZE, RawTensor

MAX_HEADER = 100_000_000
"""Bytes; the limit of the safetensors library."""


def is_safetensors(path: Path) -> bool:
    """Whether the file begins as a safetensors file does; its name does not matter."""
    with path.open("rb") as f:
        start = f.read(9)
    return len(start) == 9 and start[8:9] == b"{" and struct.unpack("<Q", start[:8])[0] <= MAX_HEADER


def read_safetensors(path: Path) -> dict[str, RawTensor]:
    """Every tensor's place in the file; no tensor is read.

    Raises:
        CheckpointError: the file is no safetensors file, is cut short, or its header lies about sizes.
    """
    size = path.stat().st_size
    with path.open("rb") as f:
        start = f.read(8)
        if len(start) < 8:
            raise CheckpointError(f"{path}: {size} bytes are too few for a safetensors file")
        length = struct.unpack("<Q", start)[0]
        if length > min(MAX_HEADER, size - 8):
            raise CheckpointError(f"{path}: no safetensors file, or cut short (a header of {length} bytes in {size})")
        raw = f.read(length)
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{path}: the safetensors header is not JSON ({e})") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the safetensors header is not an object")
    header.pop("__metadata__", None)
    return {name: _entry(path, name, entry, 8 + length, size) for name, entry in header.items()}


def _entry(path: Path, name: str, entry: Any, base: int, size: int) -> RawTensor:
    try:
        dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        ok = all(type(n) is int and n >= 0 for n in (*shape, start, end))
    except (TypeError, KeyError, ValueError):
        raise CheckpointError(f"{path}: tensor {name!r} has a broken header entry") from None
    if dtype not in ITEMSIZE:
        raise CheckpointError(f"{path}: tensor {name!r} has dtype {dtype!r}, which cannot be read here")
    if not ok or end - start != prod(shape) * ITEMSIZE[dtype]:
        raise CheckpointError(f"{path}: tensor {name!r}: {shape} {dtype} does not take bytes {start} to {end}")
    if base + end > size:
        raise CheckpointError(
            f"{path}: cut short: tensor {name!r} ends at byte {base + end}, the file at {size}; download it again"
        )
    return RawTensor(path, base + start, dtype, shape)
