"""Writing the files of a model folder, one tensor in memory at a time."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx

from openelm_mlx.dtypes import SAFETENSORS

SHARD_BYTES = 1_000_000_000
"""Largest shard, unless a single tensor is larger."""


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape of a tensor that is going to be written."""

    name: str
    dtype: mx.Dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return prod(self.shape) * self.dtype.size


def plan_shards(specs: Iterable[TensorSpec], limit: int = SHARD_BYTES) -> list[list[TensorSpec]]:
    """Split tensors, in order, into files of at most `limit` bytes."""
    shards: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if shards[-1] and size + spec.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += spec.nbytes
    return shards


def write_weights(
    folder: Path,
    specs: Iterable[TensorSpec],
    arrays: Iterable[mx.array],
    *,
    limit: int = SHARD_BYTES,
) -> None:
    """Write ``model.safetensors`` (or shards of at most `limit` bytes) and its index.

    Args:
        folder: where to.
        specs: what is going to be written, in order.
        arrays: the tensors in the same order; each is taken, written and let go before the next is taken.
        limit: bytes of a shard's tensors.
    """
    shards = plan_shards(specs, limit)
    tensors = iter(arrays)
    weight_map: dict[str, str] = {}
    for n, shard in enumerate(shards, 1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{n:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= {spec.name: name for spec in shard}
        with (folder / name).open("wb") as f:
            f.write(_header(shard))
            for spec in shard:
                f.write(_bytes_of(spec, next(tensors, None)))
            _to_disk(f)
    if next(tensors, None) is not None:  # also lets a generator run to its end
        raise AssertionError("more tensors than were planned")
    total = sum(spec.nbytes for shard in shards for spec in shard)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / "model.safetensors.index.json", index)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, indented, with a newline at its end."""
    with path.open("w", encoding="utf-8") as f:
        f.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
        _to_disk(f)


def _header(shard: list[TensorSpec]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    offset = 0
    for spec in shard:
        end = offset + spec.nbytes
        header[spec.name] = {"dtype": SAFETENSORS[spec.dtype], "shape": spec.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins 8-byte aligned, as the format asks
    return struct.pack("<Q", len(text)) + text


def _bytes_of(spec: TensorSpec, array: mx.array | None) -> memoryview:
    if array is None:
        raise AssertionError(f"{spec.name}: fewer tensors than were planned")
    if (array.dtype, array.shape) != (spec.dtype, spec.shape):
        raise AssertionError(f"{spec.name}: got {array.dtype} {array.shape}, planned {spec.dtype} {spec.shape}")
    flat: Any = array.reshape(-1).view(mx.uint8)  # a buffer, though its stub does not say so to every Python
    mx.eval(flat)
    return memoryview(flat).cast("B")


def _to_disk(f: Any) -> None:
    # A rename may reach the disk before the data does; then a power cut leaves a whole-looking folder of empty files.
    f.flush()
    os.fsync(f.fileno())
