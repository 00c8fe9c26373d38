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
from openelm_mlx.torchfile import sniff

MAX_HEADER = 100_000_000
"""Bytes; the limit of the safetensors library."""


def is_safetensors(path: Path) -> bool:
    """Whether the file begins as a safetensors file does; its name does not matter."""
    return sniff(path) == "safetensors"


def read_safetensors(path: Path) -> dict[str, RawTensor]:
    """Every tensor's place in the file; no tensor is read.

    Raises:
        CheckpointError: the file is no safetensors file, is cut short, or its header lies about sizes.
    """
    header, base, size = _read_header(path)
    header.pop("__metadata__", None)
    tensors = {name: _entry(path, name, entry, base, size) for name, entry in header.items()}
    _check_tiling(path, tensors, base, size)
    return tensors


def _read_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """The header, where the tensors' bytes begin, and the size of the file."""
    try:
        with path.open("rb") as f:
            size = f.seek(0, 2)
            f.seek(0)
            start = f.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 0 < length <= min(MAX_HEADER, size - 8):
                raise CheckpointError(
                    f"{path}: no safetensors file, or cut short: a header of {length} bytes in a file of {size}"
                )
            header = json.loads(f.read(length), object_pairs_hook=_without_repeats)
    except OSError as e:
        raise CheckpointError(f"{path}: cannot read the file: {e.strerror or e}") from None
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{path}: the safetensors header is broken ({e})") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the safetensors header is not an object")
    return header, 8 + length, size


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("it has two entries of one name")
    return found


def _entry(path: Path, name: str, entry: Any, base: int, size: int) -> RawTensor:
    try:
        dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise CheckpointError(f"{path}: tensor {name!r} has a broken header entry") from None
    if not isinstance(dtype, str) or dtype not in ITEMSIZE:
        raise CheckpointError(f"{path}: tensor {name!r} has dtype {dtype!r}, which cannot be read here")
    whole = all(type(n) is int and n >= 0 for n in (*shape, start, end))
    if not whole or end - start != prod(shape) * ITEMSIZE[dtype]:
        raise CheckpointError(f"{path}: tensor {name!r}: {shape} {dtype} does not take bytes {start} to {end}")
    if base + end > size:
        raise CheckpointError(
            f"{path}: cut short: tensor {name!r} ends at byte {base + end}, the file at {size}; download it again"
        )
    return RawTensor(path, base + start, dtype, shape)


def _check_tiling(path: Path, tensors: dict[str, RawTensor], base: int, size: int) -> None:
    """The tensors follow each other without gaps to the end of the file, as the safetensors library asks too."""
    expected = base
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset != expected:
            raise CheckpointError(f"{path}: the safetensors header leaves out or shares bytes from {expected} on")
        expected += tensor.nbytes
    if expected != size:
        raise CheckpointError(f"{path}: {size - expected} bytes follow the last tensor; download the file again")
